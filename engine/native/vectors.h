// Vectors of float32, as wide as the build's instruction set has them, and what kernels do with them.
//
// Numbers in memory are bf16, the upper half of a float32. They are widened exactly when they are
// read, and rounded to the nearest (ties to even) when they are written.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <immintrin.h>

#ifdef __AVX512F__

using Floats = __m512;
constexpr int kFloats = 16;

inline Floats zeros() { return _mm512_setzero_ps(); }
inline Floats all(float value) { return _mm512_set1_ps(value); }
inline Floats load(const float *at) { return _mm512_loadu_ps(at); }
inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats subtract(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
inline Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats divide(Floats a, Floats b) { return _mm512_div_ps(a, b); }
inline Floats smaller(Floats a, Floats b) { return _mm512_min_ps(a, b); }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats multiply_subtract(Floats a, Floats b, Floats c) { return _mm512_fmsub_ps(a, b, c); }
inline Floats nearest_integers(Floats x) { return _mm512_roundscale_ps(x, 0); }

// x * 2^n for whole numbers n; 0 far below the smallest float32.
inline Floats times_power_of_2(Floats x, Floats n) { return _mm512_scalef_ps(x, n); }

inline Floats widen(__m256i bf16) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bf16), 16));
}
inline __m256i narrow(Floats value) { return (__m256i)_mm512_cvtneps_pbh(value); }

inline Floats load_bf16(const uint16_t *at) { return widen(_mm256_loadu_si256((const __m256i *)at)); }
inline void store_bf16(uint16_t *at, Floats value) {
    _mm256_storeu_si256((__m256i *)at, narrow(value));
}
inline Floats round_bf16(Floats value) { return widen(narrow(value)); }

// Sum of the lanes in one fixed order: halves, quarters, eighths, neighbours.
inline float sum_lanes(Floats v) {
    __m256 a = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_shuffle_ps(b, b, 1)));
}

#else  // AVX2 and FMA

using Floats = __m256;
constexpr int kFloats = 8;

inline Floats zeros() { return _mm256_setzero_ps(); }
inline Floats all(float value) { return _mm256_set1_ps(value); }
inline Floats load(const float *at) { return _mm256_loadu_ps(at); }
inline void store(float *at, Floats value) { _mm256_storeu_ps(at, value); }
inline Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
inline Floats subtract(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
inline Floats multiply(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
inline Floats divide(Floats a, Floats b) { return _mm256_div_ps(a, b); }
inline Floats smaller(Floats a, Floats b) { return _mm256_min_ps(a, b); }
inline Floats larger(Floats a, Floats b) { return _mm256_max_ps(a, b); }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Floats multiply_subtract(Floats a, Floats b, Floats c) { return _mm256_fmsub_ps(a, b, c); }
inline Floats nearest_integers(Floats x) {
    return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

// x * 2^n for whole numbers n up to 127; 0 for n below -126.
inline Floats times_power_of_2(Floats x, Floats n) {
    const __m256i exponent = _mm256_cvtps_epi32(_mm256_max_ps(n, _mm256_set1_ps(-127.0f)));
    const __m256i bits = _mm256_slli_epi32(_mm256_add_epi32(exponent, _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(x, _mm256_castsi256_ps(bits));
}

inline Floats widen(__m128i bf16) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bf16), 16));
}

// Each lane rounded to bf16, in the upper half of its word; the lower half is not cleared.
inline __m256i rounded_words(Floats value) {
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i last_bit = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i half = _mm256_add_epi32(last_bit, _mm256_set1_epi32(0x7fff));
    const __m256i rounded = _mm256_add_epi32(bits, half);
    const __m256 is_nan = _mm256_cmp_ps(value, value, _CMP_UNORD_Q);  // rounding could make it infinite
    return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), _mm256_castps_si256(is_nan));
}

inline Floats round_bf16(Floats value) {
    const __m256i upper_half = _mm256_set1_epi32((int)0xffff0000);
    return _mm256_castsi256_ps(_mm256_and_si256(rounded_words(value), upper_half));
}

inline Floats load_bf16(const uint16_t *at) { return widen(_mm_loadu_si128((const __m128i *)at)); }
inline void store_bf16(uint16_t *at, Floats value) {
    const __m256i words = _mm256_srli_epi32(rounded_words(value), 16);
    const __m256i halves = _mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0xd8);
    _mm_storeu_si128((__m128i *)at, _mm256_castsi256_si128(halves));
}

// The numbers of 16 neighbours in memory: those with even places, and those with odd ones.
struct EvenAndOdd {
    Floats even, odd;
};
inline EvenAndOdd load_even_and_odd(const void *at) {
    const __m256i words = _mm256_loadu_si256((const __m256i *)at);
    const __m256i upper_half = _mm256_set1_epi32((int)0xffff0000);
    return {_mm256_castsi256_ps(_mm256_slli_epi32(words, 16)),
            _mm256_castsi256_ps(_mm256_and_si256(words, upper_half))};
}
inline void store_even_and_odd(uint16_t *at, Floats even, Floats odd) {
    const __m256i upper_half = _mm256_set1_epi32((int)0xffff0000);
    const __m256i low = _mm256_srli_epi32(rounded_words(even), 16);
    const __m256i high = _mm256_and_si256(rounded_words(odd), upper_half);
    _mm256_storeu_si256((__m256i *)at, _mm256_or_si256(low, high));
}

// Sum of the lanes in one fixed order: halves, quarters, neighbours.
inline float sum_lanes(Floats v) {
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_shuffle_ps(b, b, 1)));
}

inline float largest_lane(Floats v) {
    __m128 b = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    b = _mm_max_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_max_ss(b, _mm_shuffle_ps(b, b, 1)));
}

#endif

// 2^x: 2^n * p(r), |r| <= 1/2, p of degree 4 within 3e-6 of it; exactly 1 at 0, and 0 far below.
// x is finite, and at most 127.
inline Floats exp2_ps(Floats x) {
    const Floats n = nearest_integers(x);
    const Floats r = subtract(x, n);
    Floats p = all(9.582798928e-3f);
    p = multiply_add(p, r, all(5.590632558e-2f));
    p = multiply_add(p, r, all(2.402409911e-1f));
    p = multiply_add(p, r, all(6.931242347e-1f));
    p = multiply_add(p, r, all(1.0f));
    return times_power_of_2(p, n);
}

inline Floats silu(Floats x) {
    const Floats power = exp2_ps(smaller(multiply(x, all(-1.44269504f)), all(126.0f)));
    return divide(x, add(power, all(1.0f)));
}

// 1 over the root of a row's mean square; `size` is a multiple of kFloats.
inline float inverse_rms(const uint16_t *x, int64_t size, float eps) {
    Floats squares = zeros();
    for (int64_t i = 0; i < size; i += kFloats) {
        const Floats v = load_bf16(x + i);
        squares = multiply_add(v, v, squares);
    }
    return 1.0f / std::sqrt(sum_lanes(squares) / size + eps);
}

// RMSNorm of one row, rounded where the reference rounds; in place is fine. `size` is a multiple of kFloats.
inline void normalise(const uint16_t *x, const uint16_t *weight, uint16_t *out, int64_t size, float eps) {
    const Floats scale = all(inverse_rms(x, size, eps));
    for (int64_t i = 0; i < size; i += kFloats) {
        const Floats v = round_bf16(multiply(load_bf16(x + i), scale));
        store_bf16(out + i, multiply(v, load_bf16(weight + i)));
    }
}

// Memory that grows and never shrinks; content is lost when it grows. It starts on a cache line, as a
// tile row across two of them loads twice as long.
template <class T>
class Buffer {
  public:
    ~Buffer() { std::free(data_); }
    T *at_least(size_t count) {
        if (count > count_) {
            std::free(data_);
            data_ = (T *)std::aligned_alloc(64, (count * sizeof(T) + 63) / 64 * 64);
            count_ = count;
        }
        return data_;
    }
    T *data() const { return data_; }

  private:
    T *data_ = nullptr;
    size_t count_ = 0;
};
