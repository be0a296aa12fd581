// The kernels as MLX operations on the CPU: lazy, on MLX's stream and in MLX's memory.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>

#include "kernels.h"
#include "mlx/allocator.h"
#include "mlx/array.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/primitives.h"
#include "mlx/utils.h"

namespace nb = nanobind;
namespace mx = mlx::core;
using Arrays = std::vector<mx::array>;

namespace {

struct Buffers {
  std::vector<const void*> in;
  std::vector<void*> out;
};
using Run = std::function<void(const Buffers&)>;


float widened(const char* from, mx::Dtype type) {
  if (type == mx::bfloat16) return static_cast<float>(*reinterpret_cast<const mx::bfloat16_t*>(from));
  if (type == mx::float16) return static_cast<float>(*reinterpret_cast<const mx::float16_t*>(from));
  return *reinterpret_cast<const float*>(from);
}

// The elements of an array in the order of its indices, and as float32 if asked: for inputs that are views of something
// larger, and for small weights of another type.
void copy_dense(const mx::array& from, bool widen, char* to) {
  if (from.flags().row_contiguous && from.dtype() == mx::bfloat16) {
    const auto* narrow = from.data<mx::bfloat16_t>();
    for (size_t i = 0; i < from.size(); ++i) reinterpret_cast<float*>(to)[i] = static_cast<float>(narrow[i]);
    return;
  }
  const size_t size = from.itemsize();
  std::vector<long> index(from.ndim(), 0);
  for (size_t i = 0; i < from.size(); ++i) {
    const char* at = from.data<char>();
    for (int axis = 0; axis < int(from.ndim()); ++axis) at += index[axis] * from.strides(axis) * size;
    if (widen) {
      const float wide = widened(at, from.dtype());
      std::memcpy(to, &wide, sizeof wide), to += sizeof wide;
    } else {
      std::memcpy(to, at, size), to += size;
    }
    for (int axis = from.ndim() - 1; axis >= 0 && ++index[axis] == from.shape(axis); --axis) index[axis] = 0;
  }
}

// Inputs and outputs that an operation treats in a special way.
struct Layout {
  int weights = 0, weights_end = 0;  // inputs that the kernel reads as float32
  int donor = 0, heir = 0, heirs = 0;  // outputs from `heir` on continue the inputs from `donor` on, in their memory
};                                     // where nobody else needs it: so a cache is written in place

class Operation : public mx::Primitive {
 public:
  Operation(const char* name, Run run, Layout layout = {})
      : Primitive(mx::default_stream(mx::Device::cpu)), name_(name), run_(std::make_shared<Run>(std::move(run))),
        layout_(layout) {}

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    Buffers buffers;
    struct Copy {
      mx::array from;
      bool widen;
      char* to;
    };
    std::vector<Copy> copies;
    for (int i = 0; i < int(inputs.size()); ++i) {
      const mx::array& input = inputs[i];
      const bool widen = i >= layout_.weights && i < layout_.weights_end && input.dtype() != mx::float32;
      if ((input.flags().row_contiguous && !widen) || input.size() == 0) {
        buffers.in.push_back(input.data<char>());
        continue;
      }
      mx::array dense(input.shape(), widen ? mx::float32 : input.dtype(), nullptr, {});
      dense.set_data(mx::allocator::malloc(dense.nbytes()));
      copies.push_back({input, widen, dense.data<char>()});
      buffers.in.push_back(dense.data<char>());
      encoder.add_temporary(dense);
    }
    for (int i = 0; i < int(outputs.size()); ++i) {
      mx::array& output = outputs[i];
      const int donor = layout_.donor + i - layout_.heir;
      const bool inherits = i >= layout_.heir && i < layout_.heir + layout_.heirs;
      if (inherits && inputs[donor].is_donatable() && inputs[donor].flags().row_contiguous &&
          inputs[donor].data_size() == output.size()) {
        output.copy_shared_buffer(inputs[donor]);
      } else {
        output.set_data(mx::allocator::malloc(output.nbytes()));
      }
      buffers.out.push_back(output.data<char>());
    }
    encoder.dispatch([run = run_, buffers = std::move(buffers), copies = std::move(copies)] {
      for (const Copy& copy : copies) copy_dense(copy.from, copy.widen, copy.to);
      (*run)(buffers);
    });
  }

  void eval_gpu(const Arrays&, Arrays&) override {
    throw std::runtime_error("Headstart's CPU kernels cannot run on a GPU");
  }

  const char* name() const override {
    return name_;
  }

 private:
  const char* name_;
  std::shared_ptr<Run> run_;
  Layout layout_;
};

void require(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(what);
}

// f(float{}) or f(bfloat{}), by the type of the activations.
template <typename F>
Run by_type(const mx::array& x, F f) {
  require(x.dtype() == mx::bfloat16 || x.dtype() == mx::float32, "activations must be bfloat16 or float32");
  if (x.dtype() == mx::bfloat16) return [f](const Buffers& b) { f(b, headstart::bfloat{}); };
  return [f](const Buffers& b) { f(b, float{}); };
}

// Of a layer: its weight, and where it is quantised scales and biases.
using Layer = std::vector<mx::array>;

// `layers` share an input and are all dense, or quantised with these bits and group. `gated`: of two layers
// silu(first) · second. With `experts` [..., top] weights are [experts, N, K], and x is [..., K], or where `own` is
// set [..., top, K]; the result is [..., top, N].
Arrays products(
    const mx::array& x, const std::vector<Layer>& layers, int bits, int group, bool gated,
    const std::optional<mx::array>& experts, bool own) {
  const long K = x.shape(-1), rows = x.size() / K;
  const int parts = bits ? 3 : 1, count = layers.size();
  const long top = !experts || own ? 1 : experts->shape(-1);
  require(!bits || (bits >= 2 && bits <= 8 && bits != 7 && group % 32 == 0 && group && K % group == 0), "unknown bits");
  require(!gated || count == 2, "a gate has two layers");
  require(!experts || (experts->dtype() == mx::uint32 && long(experts->size()) == rows * top), "unknown experts");
  std::vector<headstart::Matrix> matrices;
  std::vector<mx::Shape> shapes;
  Arrays inputs = {x};
  for (const Layer& layer : layers) {
    require(int(layer.size()) == parts, "a layer must be dense or have scales and biases");
    const mx::array& w = layer[0];
    const int N = w.shape(-2);
    require(w.ndim() == (experts ? 3 : 2), "weights must be [N, K], with experts [experts, N, K]");
    if (bits) {
      require(w.dtype() == mx::uint32 && w.shape(-1) * 32l == K * bits, "codes must fit the input");
      require(layer[1].shape(-1) * long(group) == K && layer[1].shape() == layer[2].shape(), "unknown scales");
      require(layer[1].dtype() == mx::float32 || layer[1].dtype() == mx::bfloat16, "unknown scales");
      require(layer[2].dtype() == layer[1].dtype() && layer[1].shape(-2) == N, "unknown scales");
    } else {
      require(w.shape(-1) == K, "weights must be [N, K] where the input is [..., K]");
      require(w.dtype() == x.dtype(), "weights must have the type of the input");
    }
    matrices.push_back({nullptr, N, bits, bits ? group : 0, bits && layer[1].dtype() == mx::float32});
    inputs.insert(inputs.end(), layer.begin(), layer.end());
    shapes.push_back(experts ? experts->shape() : x.shape());
    if (experts) shapes.back().push_back(N);
    else shapes.back().back() = N;
  }
  if (gated) shapes.pop_back();
  if (experts) inputs.push_back(*experts);
  Run run = by_type(x, [=, chosen = bool(experts)]<typename T>(const Buffers& b, T) {
    std::vector<headstart::Matrix> filled = matrices;
    for (int i = 0; i < count; ++i) {
      filled[i].w = b.in[1 + i * parts];
      if (bits) filled[i].scales = b.in[2 + i * parts], filled[i].biases = b.in[3 + i * parts];
    }
    const auto* experts = chosen ? (const uint32_t*)b.in.back() : nullptr;
    headstart::products<T>(
        {(const T*)b.in[0], rows, K, top, count, filled.data(), (T* const*)b.out.data(), gated, experts});
  });
  return mx::array::make_arrays(
      shapes, std::vector<mx::Dtype>(shapes.size(), x.dtype()), std::make_shared<Operation>("HeadstartProducts", run),
      inputs);
}

// The norm of x; with `added` x + added and the norm of that.
Arrays norm(const mx::array& x, const mx::array& weight, float eps, const std::optional<mx::array>& added) {
  const long D = x.shape(-1), rows = x.size() / D;
  require(weight.ndim() == 1 && weight.shape(0) == D, "weight must be [D] where the input is [..., D]");
  require(!added || (added->shape() == x.shape() && added->dtype() == x.dtype()), "the sum's parts must be alike");
  Arrays inputs = {x, weight};
  if (added) inputs.push_back(*added);
  Run run = by_type(x, [=, adds = bool(added)]<typename T>(const Buffers& b, T) {
    headstart::norm<T>(
        (const T*)b.in[0], adds ? (const T*)b.in[2] : nullptr, (const float*)b.in[1], eps, rows, D,
        adds ? (T*)b.out[0] : nullptr, (T*)b.out.back());
  });
  const int count = added ? 2 : 1;
  return mx::array::make_arrays(
      std::vector<mx::Shape>(count, x.shape()), std::vector<mx::Dtype>(count, x.dtype()),
      std::make_shared<Operation>("HeadstartNorm", run, Layout{1, 2}), inputs);
}

// `window`: qkv, z, b, a; `weights`: convolution, A_log, dt_bias, norm; `pending` and what is returned behind y, state
// and conv: qkv, k, v, g, beta of drafts, or nothing.
Arrays gated_delta(
    const Arrays& window, const Arrays& weights, float eps, const mx::array& state, const mx::array& conv,
    const mx::array& accepted, const Arrays& pending, int certain) {
  require(window.size() == 4 && weights.size() == 4 && (pending.empty() || pending.size() == 5), "arrays are missing");
  const mx::array &qkv = window[0], &z = window[1];
  const int B = qkv.shape(0), W = qkv.shape(1), C = qkv.shape(2), drafts = W - certain;
  const int HV = state.shape(1), DV = state.shape(2), DK = state.shape(3), HK = (C - HV * DV) / (2 * DK);
  const int taps = weights[0].shape(1);
  require(certain >= 1 && drafts >= 0 && C == 2 * HK * DK + HV * DV && HV % HK == 0 && DK % 16 == 0, "unknown shape");
  require(z.shape() == mx::Shape{B, W, HV, DV} && state.dtype() == mx::float32, "unknown shape");
  require(conv.shape() == mx::Shape{B, taps - 1, C} && conv.dtype() == qkv.dtype(), "unknown convolution");
  require(accepted.size() == size_t(B) && accepted.dtype() == mx::int32, "accepted must be [B] integers");
  const int old = pending.empty() ? 0 : pending[0].shape(1);
  Run run = by_type(qkv, [=]<typename T>(const Buffers& b, T) {
    const auto& in = b.in;
    auto f = [&](int i) { return (const float*)in[i]; };
    headstart::GatedDelta<T> op = {B, W, certain, HK, HV, DK, DV, taps, eps};
    op.qkv = (const T*)in[0], op.z = (const T*)in[1], op.b = (const T*)in[2], op.a = (const T*)in[3];
    op.conv_weight = f(4), op.A_log = f(5), op.dt_bias = f(6), op.norm_weight = f(7), op.state = f(8);
    op.conv = (const T*)in[9], op.accepted = (const int*)in[10];
    if (old) op.old = {(const T*)in[11], f(12), f(13), f(14), f(15), old};
    op.y = (T*)b.out[0], op.new_state = (float*)b.out[1], op.new_conv = (T*)b.out[2];
    auto g = [&](int i) { return (float*)b.out[i]; };
    if (drafts) op.fresh = {(T*)b.out[3], g(4), g(5), g(6), g(7), drafts};
    headstart::gated_delta(op);
  });
  Arrays inputs = window;
  inputs.insert(inputs.end(), weights.begin(), weights.end());
  inputs.insert(inputs.end(), {state, conv, accepted});
  inputs.insert(inputs.end(), pending.begin(), pending.end());
  std::vector<mx::Shape> shapes = {z.shape(), state.shape(), conv.shape()};
  std::vector<mx::Dtype> types = {qkv.dtype(), mx::float32, qkv.dtype()};
  if (drafts) {
    shapes.insert(shapes.end(), {{B, drafts, C}, {B, drafts, HK, DK}, {B, drafts, HV, DV}, {B, drafts, HV}, {B, drafts, HV}});
    types.insert(types.end(), {qkv.dtype(), mx::float32, mx::float32, mx::float32, mx::float32});
  }
  Layout layout = {.weights = 4, .weights_end = 8, .donor = 8, .heir = 1, .heirs = 1};
  return mx::array::make_arrays(shapes, types, std::make_shared<Operation>("HeadstartGatedDelta", run, layout), inputs);
}

// → what is attended to, and the caches with the window's keys and values in them.
Arrays attention(
    const mx::array& both, const mx::array& k, const mx::array& v, const mx::array& q_weight, const mx::array& k_weight,
    const mx::array& frequencies, const mx::array& offset, const mx::array& keys, const mx::array& values, float eps,
    float scale, const std::optional<mx::array>& last) {
  const int B = keys.shape(0), HKV = keys.shape(1), capacity = keys.shape(2), D = keys.shape(3), W = both.shape(1);
  const int H = both.shape(2) / (2 * D), rotated = 2 * frequencies.size();
  require(D % 32 == 0 && H % HKV == 0 && both.shape() == mx::Shape{B, W, 2 * H * D}, "unknown shape");
  require(k.shape() == mx::Shape{B, W, HKV * D} && v.shape() == k.shape() && values.shape() == keys.shape(), "unknown shape");
  require(k.dtype() == both.dtype() && v.dtype() == both.dtype(), "queries, keys and values must have one type");
  require(keys.dtype() == both.dtype() && values.dtype() == both.dtype(), "the cache must have the type of the input");
  require(q_weight.size() == size_t(D) && k_weight.size() == size_t(D) && rotated <= D, "unknown shape");
  require(offset.size() == size_t(B) && offset.dtype() == mx::int32, "offset must be [B] integers");
  require(!last || (last->size() == size_t(B) && last->dtype() == mx::int32), "last must be [B] integers");
  const size_t bytes = keys.nbytes();
  Run run = by_type(both, [=, one = bool(last)]<typename T>(const Buffers& b, T) {
    for (int i : {7, 8})
      if (b.in[i] != b.out[i - 6]) std::memcpy(b.out[i - 6], b.in[i], bytes);
    headstart::Attention<T> op = {B, W, H, HKV, D, capacity, rotated, eps, scale};
    op.both = (const T*)b.in[0], op.k = (const T*)b.in[1], op.v = (const T*)b.in[2];
    op.q_weight = (const float*)b.in[3], op.k_weight = (const float*)b.in[4], op.frequencies = (const float*)b.in[5];
    op.offset = (const int*)b.in[6], op.last = one ? (const int*)b.in[9] : nullptr;
    op.out = (T*)b.out[0], op.keys = (T*)b.out[1], op.values = (T*)b.out[2];
    headstart::attention(op);
  });
  Arrays inputs = {both, k, v, q_weight, k_weight, frequencies, offset, keys, values};
  if (last) inputs.push_back(*last);
  Layout layout = {.weights = 3, .weights_end = 6, .donor = 7, .heir = 1, .heirs = 2};
  return mx::array::make_arrays(
      {{B, last ? 1 : W, H * D}, keys.shape(), keys.shape()}, std::vector<mx::Dtype>(3, both.dtype()),
      std::make_shared<Operation>("HeadstartAttention", run, layout), inputs);
}

}  // namespace

NB_MODULE(headstart_cpu, m) {
  using namespace nb::literals;
  m.def("isa", &headstart::isa);
  m.def("set_threads", &headstart::set_threads);
  m.def("threads", &headstart::threads);
  m.def(
      "products", &products, "x"_a, "layers"_a, "bits"_a = 0, "group"_a = 0, "gated"_a = false,
      "experts"_a = nb::none(), "own"_a = false);
  m.def("norm", &norm, "x"_a, "weight"_a, "eps"_a, "added"_a = nb::none());
  m.def("gated_delta", &gated_delta);
  m.def(
      "attention", &attention, "both"_a, "k"_a, "v"_a, "q_weight"_a, "k_weight"_a, "frequencies"_a, "offset"_a, "keys"_a,
      "values"_a, "eps"_a, "scale"_a, "last"_a = nb::none());
}
