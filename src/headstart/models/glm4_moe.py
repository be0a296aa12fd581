"""GLM-4.5, 4.6, 4.7 and Air (grouped-query attention), GLM-4.7-Flash (latent attention). Heads like DeepSeek's."""

from functools import partial

from mlx_lm.models import glm4_moe, glm4_moe_lite

from .deepseek_v3 import NEXTN, next_layer
from .family import plain_family
from .mixers import latent_attention

GLM4_MOE = plain_family("glm4_moe", glm4_moe, head_layer=partial(next_layer, glm4_moe.DecoderLayer), head=NEXTN)
GLM4_MOE_LITE = plain_family(
    "glm4_moe_lite",
    glm4_moe_lite,
    mixer=latent_attention,
    head_layer=partial(next_layer, glm4_moe_lite.Glm4MoeLiteDecoderLayer),
    head=NEXTN,
)
