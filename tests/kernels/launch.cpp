// A kernel for a GPU as one MLX operation on the CPU: lazy, as `mx.fast.metal_kernel` makes it, with the inputs that the
// kernel has and new memory for every output. It runs a function that the emulator compiled, or nothing at all.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>

#include "mlx/allocator.h"
#include "mlx/array.h"
#include "mlx/backend/common/utils.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/primitives.h"
#include "mlx/utils.h"

namespace mx = mlx::core;
namespace nb = nanobind;
using Arrays = std::vector<mx::array>;

namespace {

struct Shape {  // as in cuda_on_cpu.h
  int at[10] = {};
};
using Run = void (*)(void**, const Shape*, const int*);

void copy(const mx::array& from, char* to) {
  const size_t size = from.itemsize();
  for (size_t i = 0; i < from.size(); ++i)
    std::memcpy(to + i * size, from.data<char>() + mx::elem_to_loc(i, from.shape(), from.strides()) * size, size);
}

class Launch : public mx::Primitive {
 public:
  Launch(Run run, std::vector<int> grid)
      : Primitive(mx::default_stream(mx::Device::cpu)), run_(run), grid_(std::move(grid)) {}

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    std::vector<void*> pointers;
    std::vector<Shape> shapes;
    auto add = [&](const mx::array& array) {
      pointers.push_back(const_cast<char*>(array.data<char>()));
      Shape shape;
      for (int i = 0; i < int(array.ndim()); ++i) shape.at[i] = array.shape(i);
      shapes.push_back(shape);
    };
    std::vector<std::pair<mx::array, char*>> copies;
    for (const mx::array& input : inputs) {
      add(input);
      if (input.flags().row_contiguous) continue;
      mx::array copied(input.shape(), input.dtype(), nullptr, {});
      copied.set_data(mx::allocator::malloc(copied.nbytes()));
      encoder.add_temporary(copied);
      copies.emplace_back(input, copied.data<char>());
      pointers.back() = copied.data<char>();
    }
    for (mx::array& output : outputs) {
      output.set_data(mx::allocator::malloc(output.nbytes()));
      add(output);
    }
    std::vector<std::pair<void*, size_t>> made;  // poisoned: what is not written shows
    for (size_t i = 0; i < outputs.size(); ++i) made.emplace_back(pointers[inputs.size() + i], outputs[i].nbytes());
    encoder.dispatch([run = run_, grid = grid_, pointers = std::move(pointers), shapes = std::move(shapes),
                      made = std::move(made), copies = std::move(copies)]() mutable {
      for (auto& [from, to] : copies) copy(from, to);
      for (auto& [at, bytes] : made) std::memset(at, 255, bytes);
      if (run) run(pointers.data(), shapes.data(), grid.data());
    });
  }

  void eval_gpu(const Arrays&, Arrays&) override {
    throw std::runtime_error("this runs on a CPU");
  }

  const char* name() const override {
    return "Launch";
  }

 private:
  Run run_;
  std::vector<int> grid_;
};

Arrays launch(
    Arrays inputs, size_t function, std::vector<int> grid, const std::vector<std::vector<int>>& shapes,
    const std::vector<mx::Dtype>& types) {
  std::vector<mx::Shape> sizes;
  for (const auto& shape : shapes) sizes.emplace_back(shape.begin(), shape.end());
  auto primitive = std::make_shared<Launch>(reinterpret_cast<Run>(function), std::move(grid));
  return mx::array::make_arrays(std::move(sizes), types, std::move(primitive), std::move(inputs));
}

}  // namespace

NB_MODULE(headstart_launch, m) {
  m.def("launch", &launch);
  m.def("address", [](const mx::array& array) { return reinterpret_cast<size_t>(array.data<char>()); });
}
