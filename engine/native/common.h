// Shared by the kernels: bf16 rounding, SiLU, 2^x, transposes, and the tiles of AMX.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <immintrin.h>

inline __m512 widen(__m256i bf16) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bf16), 16));
}

inline __m512 load_bf16(const uint16_t *at) { return widen(_mm256_loadu_si256((const __m256i *)at)); }

inline __m256i narrow(__m512 value) { return (__m256i)_mm512_cvtneps_pbh(value); }

inline void store_bf16(uint16_t *at, __m512 value) {
    _mm256_storeu_si256((__m256i *)at, narrow(value));
}

inline __m512 round_bf16(__m512 value) { return widen(narrow(value)); }

// 2^x: 2^n * p(r), |r| <= 1/2, p of degree 4 within 3e-6 of it; exactly 1 at 0, and 0 far below. Finite x only.
inline __m512 exp2_ps(__m512 x) {
    const __m512 n = _mm512_roundscale_ps(x, 0);
    const __m512 r = _mm512_sub_ps(x, n);
    __m512 p = _mm512_set1_ps(9.582798928e-3f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.590632558e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.402409911e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.931242347e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
}

inline __m512 silu(__m512 x) {
    const __m512 power = exp2_ps(_mm512_min_ps(_mm512_mul_ps(x, _mm512_set1_ps(-1.44269504f)),
                                               _mm512_set1_ps(126.0f)));
    return _mm512_div_ps(x, _mm512_add_ps(power, _mm512_set1_ps(1.0f)));
}

// Sum of 16 lanes in one fixed order: halves, quarters, eighths, neighbours.
inline float sum_lanes(__m512 v) {
    __m256 a = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_shuffle_ps(b, b, 1)));
}

// 16 x 16 transpose of 32-bit elements: row i of `from` (stride in bytes) becomes column i of `to`.
inline void transpose(const void *from, int64_t from_stride, void *to, int64_t to_stride) {
    __m512i a[16], b[16];
    for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512((const char *)from + i * from_stride);
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; ++j) {
            a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + j + 2]);
            a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + j + 2]);
        }
    for (int i = 0; i < 4; ++i) {
        b[i] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x88);
        b[i + 4] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xdd);
        b[i + 8] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0x88);
        b[i + 12] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0xdd);
    }
    for (int i = 0; i < 8; ++i) {
        char *low = (char *)to + i * to_stride;
        _mm512_storeu_si512(low, _mm512_shuffle_i32x4(b[i], b[i + 8], 0x88));
        _mm512_storeu_si512(low + 8 * to_stride, _mm512_shuffle_i32x4(b[i], b[i + 8], 0xdd));
    }
}

// Grows, never shrinks; content is lost when it grows. A tile row across two cache lines loads twice
// as long, so it starts on one.
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

// What AMX is told about its eight tiles, as it wants it. A thread's tiles are its own.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start = 0, zero[14] = {};
    uint16_t bytes[16] = {};   // of a row
    uint8_t rows[16] = {};

    void set(int tile, int count, int row_bytes) {
        rows[tile] = count;
        bytes[tile] = row_bytes;
    }
    void load() const {
        __asm__ volatile("" ::"r"(this) : "memory");  // the intrinsic names 8 of its 64 bytes
        _tile_loadconfig(this);
    }
};

// Tiles for as long as this lives: first all of 16 rows of 64 bytes.
struct Tiles {
    Tiles() {
        TileShapes shapes;
        for (int i = 0; i < 8; ++i) shapes.set(i, 16, 64);
        shapes.load();
    }
    ~Tiles() { _tile_release(); }
};
