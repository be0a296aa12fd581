// Print the bits of what lanes compute of made-up numbers: all that the CPU kernels have in a form for each CPU.
#include <cstdio>
#include <vector>

#include "floats.h"
#include "lanes.h"
#include "math.h"

using namespace headstart;

constexpr int COUNT = 16 * LANES;
uint32_t seed = 1;
uint32_t next() {
  return seed = seed * 1664525u + 1013904223u;
}

template <typename T>
std::vector<T> numbers() {
  std::vector<T> made(COUNT);
  for (T& x : made) assign(x, float(int32_t(next()) >> 8) / float(1 << (20 + (next() >> 30))));
  return made;
}

void print(const char* name, const float* x, int count = LANES) {
  std::printf("%s", name);
  for (int i = 0; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, x + i, 4);
    std::printf(" %08x", bits);
  }
  std::printf("\n");
}
void print(const char* name, Lanes x) {
  float at[LANES];
  store(at, x);
  print(name, at);
}

template <typename T>
void print_pairs(const char* name, T from) {
  const Pair pair = load_pair(from);
  print(name, pair.first), print(name, pair.second);
  for (long n : {0, 1, 16, 31}) {
    const Pair part = first_of<std::remove_cv_t<std::remove_reference_t<decltype(*from)>>>(pair, n);
    print(name, part.first), print(name, part.second);
  }
}

template <int N>
void print_sums(const float* x) {
  Lanes given[N];
  for (int i = 0; i < N; ++i) given[i] = load(x + LANES * i);
  float made[N];
  sums(given, made);
  print("sums", made, N);
}

int main() {
  std::fprintf(stderr, "%s\n", HEADSTART_ISA);
  const auto x = numbers<float>(), y = numbers<float>(), z = numbers<float>();
  const Lanes a = load(x.data()), b = load(y.data()), c = load(z.data());
  print("splat", splat(x[0])), print("add", a + b), print("multiply", a * b);
  print("larger", larger(a, b)), print("fma", fma(a, b, c));
  print_sums<16>(x.data()), print_sums<8>(y.data()), print_sums<5>(z.data());
  float alone[] = {sum(a), dot(x.data(), y.data(), COUNT), dot(x.data(), y.data(), COUNT - 5)};
  print("sum", alone, 3);

  const auto narrow = numbers<bfloat>();
  print_pairs("float", x.data()), print_pairs("bfloat", narrow.data());
  std::vector<half> halves(COUNT);
  std::vector<eight> codes(COUNT);
  for (half& each : halves) each.bits = next() >> 16 & 0xbbff;  // below one, of both signs, and subnormal ones
  for (eight& each : codes) each.code = int8_t(next() >> 24);
  print_pairs("half", halves.data());
  const Pair eights = load_pair(Eights<float>{codes.data(), y.data()});
  print("eights", eights.first), print("eights", eights.second);

  std::vector<e4m3> bytes(COUNT);
  for (int i = 0; i < COUNT; ++i) bytes[i].bits = (i & 0x7f) == 0x7f ? 1 : i;  // every one that is a number
  for (int i = 0; i < COUNT; i += PAIR) {
    const Pair floats = load_pair(bytes.data() + i);
    print("e4m3", floats.first), print("e4m3", floats.second);
  }
  const Lanes words = load(codes.data());
  print("e2m1", map([](Floats each) { return e2m1((Bits)each); }, words));
  float powers[LANES];
  for (int i = 0; i < LANES; ++i) powers[i] = to_float(e8m0{uint8_t(i * 16)});
  print("e8m0", powers);

  std::vector<bfloat> rounded(COUNT);
  std::vector<float> made[6];
  for (auto& each : made) each.resize(COUNT);
  for (int i = 0; i < COUNT; ++i) {
    assign(rounded[i], x[i]);
    made[0][i] = to_float(rounded[i]), made[1][i] = exponential(x[i]), made[2][i] = silu(x[i]);
    made[3][i] = softplus(x[i]);
    sine_and_cosine(x[i], made[4][i], made[5][i]);
  }
  for (const auto& each : made) print("function", each.data(), COUNT);
}
