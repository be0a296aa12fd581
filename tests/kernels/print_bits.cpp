// Run every CPU kernel on made-up numbers and print a hash of the bits it computes, one line for each.
#include <cstdio>
#include <cstring>
#include <vector>

#include "kernels.h"

using namespace headstart;

uint32_t seed = 1;
uint32_t next() {
  return seed = seed * 1664525u + 1013904223u;
}

float number() {
  return float(int32_t(next()) >> 8) / float(1 << 23) * 2.0f;
}

void assign(float& to, float x) {
  to = x;
}
void assign(bfloat& to, float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  to.bits = uint16_t(bits >> 16);
}

template <typename T>
std::vector<T> numbers(long n, float scale = 1.0f) {
  std::vector<T> made(n);
  for (T& x : made) assign(x, number() * scale);
  return made;
}

template <typename T>
void print(const char* name, const std::vector<T>& x) {
  uint64_t hash = 14695981039346656037ull;
  const auto* bytes = reinterpret_cast<const unsigned char*>(x.data());
  for (size_t i = 0; i < x.size() * sizeof(T); ++i) hash = (hash ^ bytes[i]) * 1099511628211ull;
  std::printf("%s %zu %016llx\n", name, sizeof(T), static_cast<unsigned long long>(hash));
}

template <typename T>
void products_of(int bits, int group, Number scale, bool gated) {
  const long rows = 11, K = bits ? 416 : 390, N = 37;
  const auto x = numbers<T>(rows * K), w = numbers<T>(2 * N * K, 0.1f);
  std::vector<uint32_t> codes(2 * N * K * (bits ? bits : 1) / 32 + 1);
  for (uint32_t& word : codes) word = next() & (scales_floats(scale) && bits == 8 ? 0xf7f7f7f7 : 0xffffffff);
  const auto scales = numbers<float>(2 * N * K / 32), biases = numbers<float>(2 * N * K / 32);
  const auto narrow_scales = numbers<bfloat>(2 * N * K / 32), narrow_biases = numbers<bfloat>(2 * N * K / 32);
  std::vector<half> halves(2 * N * K / 32);
  for (half& each : halves) each.bits = next() & 0xbbff;  // every float16 below one, of both signs, and subnormal ones
  std::vector<uint8_t> bytes(2 * N * K / 16);  // no infinite ones
  for (uint8_t& each : bytes) each = scale == Number::E8M0 ? 110 + (next() >> 28) : next() >> 24 & 0xf7;
  const float factors[] = {0.37f};
  Matrix matrices[2];
  for (int i = 0; i < 2; ++i) {
    const long at = i * N * K;
    matrices[i] = {w.data() + at, N};
    if (!bits) continue;
    matrices[i] = {codes.data() + at * bits / 32, N, bits, group, scale};
    const bool wide = scale == Number::FLOAT;
    matrices[i].scales = wide ? (const void*)(scales.data() + at / group) : narrow_scales.data() + at / group;
    matrices[i].biases = wide ? (const void*)(biases.data() + at / group) : narrow_biases.data() + at / group;
    if (scale == Number::HALF) matrices[i].scales = matrices[i].biases = halves.data() + at / group;
    if (scales_floats(scale)) matrices[i].scales = bytes.data() + at / group;
    if (scales_floats(scale)) matrices[i].biases = group == 16 ? factors : nullptr;
  }
  std::vector<T> out[2] = {std::vector<T>(rows * N), std::vector<T>(rows * N)};
  void* to[2] = {out[0].data(), out[1].data()};
  products<T>({x.data(), rows, K, 1, 2, matrices, to, false, gated, nullptr});
  print(gated ? "gated" : "product", out[0]);
  if (!gated) print("product", out[1]);
}

template <typename T>
void attention_of(bool eight, long window) {
  const long B = 2, width = 9, H = 4, HKV = 2, capacity = 620, DK = 64, DV = 32, size = eight ? 1 : sizeof(T);
  Attention<T> op = {B, width, H, HKV, capacity, window, 1e-6f, 0.2f, 0.7f};
  const auto q = numbers<T>(B * width * H * DK), k = numbers<T>(B * width * HKV * DK);
  const auto v = numbers<T>(B * width * HKV * DV), gates = numbers<T>(B * width * H);
  const auto q_weight = numbers<float>(DK), k_weight = numbers<float>(DK), frequencies = numbers<float>(8);
  const auto scales = numbers<float>(3), sinks = numbers<float>(H);
  auto past = numbers<T>(B * HKV * capacity * (DK + DV));
  std::vector<T> key_scales(B * HKV * capacity * DK / 32), value_scales(key_scales), out(B * width * H * DV);
  const int offset[B] = {600, 3};
  op.q = q.data(), op.k = k.data(), op.v = v.data(), op.gates = gates.data(), op.gated = false;
  op.q_weight = q_weight.data(), op.k_weight = k_weight.data();
  op.rotation = {16, window > 0, 1.1f, frequencies.data(), nullptr};
  op.query_scales = scales.data(), op.period = 250, op.periods = 3, op.sinks = sinks.data();
  op.offset = offset, op.last = nullptr, op.out = out.data();
  auto* bytes = reinterpret_cast<unsigned char*>(past.data());
  op.keys = {DK, bytes, eight ? key_scales.data() : nullptr};
  op.values = {DV, bytes + B * HKV * capacity * DK * size, eight ? value_scales.data() : nullptr};
  attention(op);
  print("attention", out), print("caches", past), print("scales", key_scales);
}

template <typename T>
void everything() {
  products_of<T>(0, 0, Number::BFLOAT, false);
  products_of<T>(0, 0, Number::BFLOAT, true);
  products_of<T>(4, 32, Number::E8M0, false), products_of<T>(8, 32, Number::E8M0, false);
  products_of<T>(4, 16, Number::E4M3, false), products_of<T>(4, 16, Number::E4M3, true);
  for (int bits : {1, 2, 3, 4, 5, 6, 8})
    for (Number scale : {Number::BFLOAT, Number::FLOAT, Number::HALF}) products_of<T>(bits, 32, scale, false);

  const long rows = 9, E = 20, top = 4, D = 70;
  std::vector<uint32_t> indices(rows * top);
  std::vector<float> scores(rows * top);
  route<T>(numbers<T>(rows * E).data(), rows, E, top, true, indices.data(), scores.data());
  print("route", indices), print("route", scores);
  std::vector<T> out(rows * D), total(rows * D);
  const auto parts = numbers<T>(rows * top * D), shared = numbers<T>(rows * D), gate = numbers<T>(rows);
  combine<T>(parts.data(), scores.data(), shared.data(), gate.data(), rows, top, D, out.data());
  print("combine", out);
  const auto x = numbers<T>(rows * D), added = numbers<T>(rows * D);
  const auto weight = numbers<float>(D);
  norm<T>(x.data(), added.data(), weight.data(), 1e-6f, rows, D, total.data(), out.data());
  print("norm", total), print("norm", out);

  const long B = 2, W = 5, HK = 2, HV = 4, DK = 32, DV = 24, taps = 4, C = 2 * HK * DK + HV * DV;
  GatedDelta<T> delta = {B, W, 1, HK, HV, DK, DV, taps, 1e-6f};
  const auto qkv = numbers<T>(B * W * C), z = numbers<T>(B * W * HV * DV), b = numbers<T>(B * W * HV);
  const auto a = numbers<T>(B * W * HV), history = numbers<T>(B * (taps - 1) * C);
  const auto conv_weight = numbers<float>(C * taps), A_log = numbers<float>(HV), dt_bias = numbers<float>(HV);
  const auto norm_weight = numbers<float>(DV), state = numbers<float>(B * HV * DV * DK);
  std::vector<T> y(B * W * HV * DV), new_conv(B * (taps - 1) * C), kept(B * (W - 1) * C);
  std::vector<float> new_state(state.size()), k(B * (W - 1) * HK * DK), v(B * (W - 1) * HV * DV), g(B * (W - 1) * HV), beta(g);
  const int accepted[B] = {0, 0};
  delta.qkv = qkv.data(), delta.z = z.data(), delta.b = b.data(), delta.a = a.data();
  delta.conv_weight = conv_weight.data(), delta.A_log = A_log.data(), delta.dt_bias = dt_bias.data();
  delta.norm_weight = norm_weight.data(), delta.state = state.data(), delta.conv = history.data();
  delta.accepted = accepted, delta.y = y.data(), delta.new_state = new_state.data(), delta.new_conv = new_conv.data();
  delta.fresh = {kept.data(), k.data(), v.data(), g.data(), beta.data(), W - 1};
  gated_delta(delta);
  print("gated delta", y), print("state", new_state), print("drafts", v), print("drafts", g);

  for (bool eight : {false, true})
    for (long window : {0, 70}) attention_of<T>(eight, window);
}

int main() {
  std::fprintf(stderr, "%s\n", isa());
  everything<float>();
  everything<bfloat>();
}
