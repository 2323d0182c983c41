// What the kernels for AVX512 share: transposes, and the tiles of AMX.
#pragma once

#include "vectors.h"

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
