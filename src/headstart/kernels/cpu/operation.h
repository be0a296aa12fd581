// Kernels in a row as one MLX operation on the CPU: lazy, on MLX's stream and in MLX's memory.
#pragma once

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "mlx/allocator.h"
#include "mlx/array.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/primitives.h"
#include "mlx/utils.h"

namespace headstart {

namespace mx = mlx::core;
using Arrays = std::vector<mx::array>;

// Where a kernel finds an array: among the inputs, the outputs, the scratch buffers or the weights of its operation; -1:
// there is none.
struct Slot {
  enum Kind { INPUT, OUTPUT, SCRATCH, WEIGHT } kind = INPUT;
  int index = -1;
};

struct Memory {
  std::vector<void*> at[4];  // by kind

  template <typename T>
  T* get(Slot slot) const {
    return slot.index < 0 ? nullptr : static_cast<T*>(at[slot.kind][slot.index]);
  }
};
using Kernel = std::function<void(const Memory&)>;

// What an operation runs, and on which memory.
class Chain {
 public:
  // An input in row-major order; `widen`: as float32, whatever its type.
  Slot input(const mx::array& array, bool widen = false) {
    inputs_.push_back(array);
    widens_.push_back(widen && array.dtype() != mx::float32);
    return {Slot::INPUT, int(inputs_.size()) - 1};
  }

  Slot input(const std::optional<mx::array>& array, bool widen = false) {
    return array ? input(*array, widen) : Slot{};
  }

  // An input that several layers are given.
  Slot shared(const mx::array& array) {
    for (size_t i = 0; i < inputs_.size(); ++i)
      if (inputs_[i].id() == array.id() && !widens_[i]) return {Slot::INPUT, int(i)};
    return input(array);
  }

  // An input that stays as it is. MLX asks for every input of every operation in every step whether it is computed, so
  // what is in memory already is held by the operation instead.
  Slot weight(const mx::array& array, bool widen = false) {
    if (!array.is_available() || !array.flags().row_contiguous || (widen && array.dtype() != mx::float32))
      return input(array, widen);
    weights_.push_back(array);
    return {Slot::WEIGHT, int(weights_.size()) - 1};
  }

  Slot weight(const std::optional<mx::array>& array, bool widen = false) {
    return array ? weight(*array, widen) : Slot{};
  }

  Slot output(mx::Shape shape, mx::Dtype type) {
    shapes_.push_back(std::move(shape)), types_.push_back(type), donors_.push_back(-1);
    return {Slot::OUTPUT, int(shapes_.size()) - 1};
  }

  // An output that takes over an input's memory where nobody else needs it: so a cache is written in place.
  Slot output_over(Slot input) {
    const mx::array& array = inputs_[input.index];
    const Slot slot = output(array.shape(), array.dtype());
    donors_.back() = input.index;
    return slot;
  }

  Slot scratch(size_t bytes) {
    auto fits = [&](int i) { return scratch_[i] == bytes; };
    auto found = std::find_if(free_.begin(), free_.end(), fits);
    used_.push_back(found == free_.end() ? int(scratch_.size()) : *found);
    if (found == free_.end()) scratch_.push_back(bytes);
    else free_.erase(found);
    return {Slot::SCRATCH, used_.back()};
  }

  // Let what comes next write over all scratch buffers, or keep those that there are.
  void reuse_scratch() {
    free_.insert(free_.end(), used_.begin(), used_.end()), used_.clear();
  }
  void keep_scratch() {
    used_.clear();
  }

  void add(Kernel kernel) {
    kernels_.push_back(std::move(kernel));
  }

  Arrays make(const char* name);

 private:
  friend class Operation;
  Arrays inputs_, weights_;
  std::vector<bool> widens_;
  std::vector<mx::Shape> shapes_;
  std::vector<mx::Dtype> types_;
  std::vector<int> donors_;  // by output: the input whose memory it takes over, or -1
  std::vector<size_t> scratch_;
  std::vector<int> used_, free_;  // of the scratch buffers, since they were kept or may be reused
  std::vector<Kernel> kernels_;
};

inline float widened(const char* from, mx::Dtype type) {
  if (type == mx::bfloat16) return static_cast<float>(*reinterpret_cast<const mx::bfloat16_t*>(from));
  if (type == mx::float16) return static_cast<float>(*reinterpret_cast<const mx::float16_t*>(from));
  return *reinterpret_cast<const float*>(from);
}

// Copy an array in the order of its indices, as float32 if asked.
inline void copy_dense(const mx::array& from, bool widen, char* to) {
  if (widen && from.flags().row_contiguous && from.dtype() == mx::bfloat16) {
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

// How many arrays share the description of this one. Each of an operation's outputs holds all inputs, and so
// `is_donatable`, which expects one, is never true of an operation with several outputs. MLX keeps the member private;
// an explicit instantiation may name it all the same.
template <auto DESCRIPTION>
struct Description {
  friend long sharing(const mx::array& array) {
    return (array.*DESCRIPTION).use_count();
  }
};
template struct Description<&mx::array::array_desc_>;
long sharing(const mx::array& array);

// Whether an operation with so many outputs is the last to need the memory of its input.
inline bool can_take_over(const mx::array& input, size_t outputs) {
  const auto& data = input.data_shared_ptr();
  return sharing(input) == long(outputs) && data.use_count() == 1 && data->is_owned();
}

class Operation : public mx::Primitive {
 public:
  Operation(const char* name, Chain chain)
      : Primitive(mx::default_stream(mx::Device::cpu)), name_(name),
        chain_(std::make_shared<const Chain>(std::move(chain))) {}

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    Memory memory;
    struct Copy {
      mx::array from;
      bool widen;
      char* to;
    };
    std::vector<Copy> copies;
    auto temporary = [&](mx::array made) {
      made.set_data(mx::allocator::malloc(made.nbytes()));
      encoder.add_temporary(made);
      return made.data<char>();
    };
    for (int i = 0; i < int(inputs.size()); ++i) {
      const mx::array& input = inputs[i];
      const bool widen = chain_->widens_[i];
      char* at = const_cast<char*>(input.data<char>());
      if (input.size() && (widen || !input.flags().row_contiguous)) {
        at = temporary(mx::array(input.shape(), widen ? mx::float32 : input.dtype(), nullptr, {}));
        copies.push_back({input, widen, at});
      }
      memory.at[Slot::INPUT].push_back(at);
    }
    for (const mx::array& weight : chain_->weights_)
      memory.at[Slot::WEIGHT].push_back(const_cast<char*>(weight.data<char>()));
    for (int i = 0; i < int(outputs.size()); ++i) {
      mx::array& output = outputs[i];
      const int donor = chain_->donors_[i];
      if (donor >= 0 && can_take_over(inputs[donor], outputs.size()) && inputs[donor].flags().row_contiguous &&
          inputs[donor].data_size() == output.size()) {
        output.copy_shared_buffer(inputs[donor]);
      } else {
        output.set_data(mx::allocator::malloc(output.nbytes()));
      }
      memory.at[Slot::OUTPUT].push_back(output.data<char>());
    }
    for (size_t bytes : chain_->scratch_)
      memory.at[Slot::SCRATCH].push_back(temporary(mx::array({int(bytes)}, mx::uint8, nullptr, {})));
    encoder.dispatch([chain = chain_, memory = std::move(memory), copies = std::move(copies)] {
      for (const Copy& copy : copies) copy_dense(copy.from, copy.widen, copy.to);
      for (const Kernel& kernel : chain->kernels_) kernel(memory);
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
  std::shared_ptr<const Chain> chain_;
};

inline Arrays Chain::make(const char* name) {
  Arrays inputs = std::exchange(inputs_, {});
  std::vector<mx::Shape> shapes = std::exchange(shapes_, {});
  std::vector<mx::Dtype> types = std::exchange(types_, {});
  return mx::array::make_arrays(
      std::move(shapes), types, std::make_shared<Operation>(name, std::move(*this)), std::move(inputs));
}

}  // namespace headstart
