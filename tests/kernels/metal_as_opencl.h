// The words of Metal that our kernels use, as C++ for OpenCL: declared only, nothing is run. OpenCL has Metal's address
// spaces, and no generic one where it is switched off, so that a pointer without its qualifier is an error.

#define device __global
#define constant __constant
#define threadgroup __local
#define thread __private
#define INFINITY __builtin_inff()

#pragma OPENCL EXTENSION cl_khr_fp16 : enable
typedef half float16_t;
typedef half bfloat16_t;
typedef unsigned char uint8_t;
typedef unsigned char uchar;
typedef signed char int8_t;
typedef unsigned short ushort;
typedef unsigned short uint16_t;
typedef short int16_t;
typedef unsigned int uint;
typedef unsigned int uint32_t;
typedef int int32_t;
typedef unsigned long uint64_t;
typedef long int64_t;
typedef unsigned long ulong;
template <typename To, typename From>
To as_type(From);
typedef uint uint2 __attribute__((ext_vector_type(2)));
typedef uint uint3 __attribute__((ext_vector_type(3)));
typedef uint uint4 __attribute__((ext_vector_type(4)));
typedef float float2 __attribute__((ext_vector_type(2)));
typedef float float4 __attribute__((ext_vector_type(4)));

namespace metal {
enum class mem_flags { mem_none, mem_device, mem_threadgroup };
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);
struct atomic_uint {
  uint value;
};
enum memory_order { memory_order_relaxed };
uint atomic_load_explicit(const threadgroup atomic_uint*, memory_order);
void atomic_store_explicit(threadgroup atomic_uint*, uint, memory_order);
uint atomic_fetch_add_explicit(threadgroup atomic_uint*, uint, memory_order);
float simd_shuffle_xor(float, ushort);
int simd_shuffle_xor(int, ushort);
uint simd_shuffle_xor(uint, ushort);
float fma(float, float, float);
float abs(float);
float max(float, float);
float min(float, float);
int max(int, int);
int min(int, int);
template <typename T, int ROWS, int COLUMNS>
struct simdgroup_matrix {
  thread T (&thread_elements() thread)[2];
};
template <typename T>
void simdgroup_multiply_accumulate(
    thread simdgroup_matrix<T, 8, 8>&, thread simdgroup_matrix<T, 8, 8>&, thread simdgroup_matrix<T, 8, 8>&,
    thread simdgroup_matrix<T, 8, 8>&);
template <typename T, int DIMENSIONS>
struct dextents {
  dextents(T, T) thread;
};
struct tensor_inline {};
struct execution_simdgroup {};
template <typename T, typename Extents, typename Kind>
struct tensor;
template <typename T, typename Extents, typename Kind>
struct tensor<threadgroup T, Extents, Kind> {
  tensor(threadgroup T*, const thread Extents&) thread;
};
namespace precise {
float sqrt(float);
float exp(float);
float exp2(float);
float log(float);
float sin(float);
float cos(float);
}  // namespace precise
}  // namespace metal

namespace mpp {
namespace tensor_ops {
struct matmul2d_descriptor {
  enum class mode { multiply, multiply_accumulate };
  int sizes[3];
  constexpr matmul2d_descriptor(int m, int n, int k, bool, bool, bool, mode) : sizes{m, n, k} {}
};
struct CooperativeTensor {
  static ushort get_capacity();
  bool is_valid_element(ushort) const thread;
  struct Index {
    int operator[](int) const thread;
  };
  Index get_multidimensional_index(ushort) const thread;
  thread float& operator[](ushort) thread;
};
CooperativeTensor any_tensor();
template <const constant matmul2d_descriptor& D, typename Scope>
struct matmul2d {
  template <typename A, typename B, typename C>
  CooperativeTensor get_destination_cooperative_tensor() const thread { return any_tensor(); }
  template <typename A, typename B>
  void run(const thread A&, const thread B&, thread CooperativeTensor&) const thread {}
};
}  // namespace tensor_ops
}  // namespace mpp
