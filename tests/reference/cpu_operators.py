"""Let a torchvision for CUDA be imported beside a torch for CPUs: it says of operators that it lacks what they
return."""

import torch

for name in (
    "nms", "qnms", "roi_align", "_roi_align_backward", "ps_roi_align", "_ps_roi_align_backward", "roi_pool",
    "_roi_pool_backward", "ps_roi_pool", "_ps_roi_pool_backward", "qroi_align", "deform_conv2d",
    "_deform_conv2d_backward",
):  # fmt: skip
    torch.library.define(f"torchvision::{name}", "(Tensor x) -> Tensor")
