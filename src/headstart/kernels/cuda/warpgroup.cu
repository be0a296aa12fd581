// Products that the four warps of a warpgroup ask for together, of Hopper cards alone (wgmma): 64 rows by a tile in
// shared memory, which the tensor cores read themselves. They run while the warps go on, until they are waited for.
//
// A tile is a panel of 64 columns of two bytes, at a multiple of 1024 bytes: lines of 128 bytes, whose unit u of
// 16 bytes lies at u ^ line % 8. A warp's fragments are those of tensor_core.cu, of its sixteen of the rows.

namespace headstart {

// What this thread copied or wrote into shared memory can be read by the tensor cores; by other warps' after a barrier.
__device__ __forceinline__ void show_to_tensor_cores() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Before products whose registers this thread has written.
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// All but the last N groups of products are done.
template <int N>
__device__ __forceinline__ void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// Nothing that reads or writes these registers is moved across.
template <int N>
__device__ __forceinline__ void hold(float (&c)[N][4]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])::"memory");
}

template <int N>
__device__ __forceinline__ void hold(uint32_t (&a)[N][4]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(a[i][0]), "+r"(a[i][1]), "+r"(a[i][2]), "+r"(a[i][3])::"memory");
}

// How a product finds what begins at this line and column of a panel: a line that is a multiple of 8, a column that
// is a multiple of 16. `next` is the next panel, for tiles of more than 64 columns.
__device__ __forceinline__ unsigned long long describe_panel(const void* begin, int next = 0) {
  return 1ull << 62 | 1024ull / 16 << 32 | static_cast<unsigned long long>(next / 16) << 16 | shared_address(begin) / 16;
}

// c [64, 64] = a [64, 16] · b [64, 16]ᵀ, or += where it `adds`.
template <typename T>
__device__ void multiply_panels(float (&c)[8][4], unsigned long long a, unsigned long long b, bool adds);

// c [64, 8·N] += a [64, 16] · b [16, 8·N], a in registers.
template <typename T, int N>
__device__ void multiply_by_panels(float (&c)[N][4], const uint32_t (&a)[4], unsigned long long b);

// c [64, 8·N] += a [64, 16] · b [8·N, 16]ᵀ, a in registers.
template <typename T, int N>
__device__ void multiply_by_lines(float (&c)[N][4], const uint32_t (&a)[4], unsigned long long b);

#define HEADSTART_4(i) "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
#define HEADSTART_16(i) HEADSTART_4(i), HEADSTART_4(i + 1), HEADSTART_4(i + 2), HEADSTART_4(i + 3)
#define HEADSTART_64(i) HEADSTART_16(i), HEADSTART_16(i + 4), HEADSTART_16(i + 8), HEADSTART_16(i + 12)
#define HEADSTART_TO_15 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define HEADSTART_TO_31 HEADSTART_TO_15 \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define HEADSTART_TO_47 HEADSTART_TO_31 \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define HEADSTART_TO_63 HEADSTART_TO_47 \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define HEADSTART_TO_95 HEADSTART_TO_63 \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, " \
  "%86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define HEADSTART_TO_127 HEADSTART_TO_95 \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, " \
  "%115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

#define HEADSTART_PANELS(T, TYPE)                                                                                 \
  template <>                                                                                                     \
  __device__ __forceinline__ void multiply_panels<T>(float (&c)[8][4], unsigned long long a, unsigned long long b, bool adds) {       \
    asm volatile("{.reg .pred adds; setp.ne.b32 adds, %34, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE   \
                 "." TYPE " {" HEADSTART_TO_31 "}, %32, %33, adds, 1, 1, 0, 0;}"                                  \
                 : HEADSTART_16(0), HEADSTART_16(4)                                                               \
                 : "l"(a), "l"(b), "r"(int(adds)));                                                               \
  }
#define HEADSTART_BY(NAME, ACROSS, T, TYPE, COLUMNS, REGISTERS, A, B, ...)                                        \
  template <>                                                                                                     \
  __device__ __forceinline__ void multiply_by_##NAME<T>(                                                          \
      float (&c)[COLUMNS / 8][4], const uint32_t (&a)[4], unsigned long long b) {                                 \
    asm volatile("{.reg .pred adds; setp.ne.b32 adds, 1, 0; wgmma.mma_async.sync.aligned.m64n" #COLUMNS           \
                 "k16.f32." TYPE "." TYPE " {" REGISTERS "}, {" A "}, " B ", adds, 1, 1, " #ACROSS ";}"           \
                 : __VA_ARGS__                                                                                    \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                           \
  }
#define HEADSTART_BY_64(NAME, ACROSS, T, TYPE)                                                                    \
  HEADSTART_BY(NAME, ACROSS, T, TYPE, 64, HEADSTART_TO_31, "%32, %33, %34, %35", "%36", HEADSTART_16(0),          \
               HEADSTART_16(4))                                                                                   \
  HEADSTART_BY(NAME, ACROSS, T, TYPE, 128, HEADSTART_TO_63, "%64, %65, %66, %67", "%68", HEADSTART_64(0))
#define HEADSTART_PRODUCTS(T, TYPE)                                                                               \
  HEADSTART_PANELS(T, TYPE)                                                                                       \
  HEADSTART_BY_64(panels, 1, T, TYPE)                                                                             \
  HEADSTART_BY(panels, 1, T, TYPE, 192, HEADSTART_TO_95, "%96, %97, %98, %99", "%100", HEADSTART_64(0),           \
               HEADSTART_16(16), HEADSTART_16(20))                                                                \
  HEADSTART_BY(panels, 1, T, TYPE, 256, HEADSTART_TO_127, "%128, %129, %130, %131", "%132", HEADSTART_64(0),      \
               HEADSTART_64(16))                                                                                  \
  HEADSTART_BY_64(lines, 0, T, TYPE)                                                                              \
  HEADSTART_BY(lines, 0, T, TYPE, 32, HEADSTART_TO_15, "%16, %17, %18, %19", "%20", HEADSTART_16(0))              \
  HEADSTART_BY(lines, 0, T, TYPE, 96, HEADSTART_TO_47, "%48, %49, %50, %51", "%52", HEADSTART_16(0),              \
               HEADSTART_16(4), HEADSTART_16(8))

HEADSTART_PRODUCTS(__nv_bfloat16, "bf16")
HEADSTART_PRODUCTS(__half, "f16")

}  // namespace headstart
