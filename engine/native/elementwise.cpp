// What lies between the products, rounded to bf16 where the reference rounds.

#include "team.h"
#include "vectors.h"

namespace {

// Rotates the halves of one head in float32 and rounds once; in place is fine.
void rotate(const uint16_t *x, const float *cos, const float *sin, uint16_t *out, int dim) {
    for (int i = 0; i < dim / 2; i += kFloats) {
        const Floats a = load_bf16(x + i), b = load_bf16(x + dim / 2 + i);
        const Floats c = load(cos + i), s = load(sin + i);
        store_bf16(out + i, multiply_subtract(a, c, multiply(b, s)));
        store_bf16(out + dim / 2 + i, multiply_add(b, c, multiply(a, s)));
    }
}

}  // namespace

// RMSNorm of [rows, size]; `size` is a multiple of 16.
extern "C" void rms_norm(const uint16_t *x, const uint16_t *weight, uint16_t *out, int64_t rows,
                         int64_t size, float eps, int threads) {
    share_out_rows(rows, threads, [&](int64_t row) {
        normalise(x + row * size, weight, out + row * size, size, eps);
    });
}

// [rows, 2 * size] of gates and what they gate -> [rows, size].
extern "C" void silu_mul(const uint16_t *x, uint16_t *out, int64_t rows, int64_t size, int threads) {
    share_out_rows(rows, threads, [&](int64_t row) {
        for (int64_t i = 0; i < size; i += kFloats) {
            const Floats gate = round_bf16(silu(load_bf16(x + row * 2 * size + i)));
            store_bf16(out + row * size + i,
                       multiply(gate, load_bf16(x + row * 2 * size + size + i)));
        }
    });
}

// qkv [rows, (heads + 2 kv_heads) * dim]: normalises q and k if asked, rotates q in place, rotated k
// and v go to their slots. `slots` are element offsets of each row's token in a layer's K (and V).
extern "C" void rope_store(uint16_t *qkv, int64_t rows, const uint16_t *q_norm,
                           const uint16_t *k_norm, float eps, const float *cos, const float *sin,
                           const int64_t *slots, uint16_t *keys, uint16_t *values, int64_t head,
                           int heads, int kv_heads, int dim, int threads) {
    share_out_rows(rows, threads, [&](int64_t row) {
        uint16_t *q = qkv + row * (heads + 2 * kv_heads) * dim;
        uint16_t *k = q + heads * dim, *v = k + kv_heads * dim;
        const float *c = cos + row * dim / 2, *s = sin + row * dim / 2;
        for (int h = 0; h < heads; ++h, q += dim) {
            if (q_norm) normalise(q, q_norm, q, dim, eps);
            rotate(q, c, s, q, dim);
        }
        for (int h = 0; h < kv_heads; ++h, k += dim, v += dim) {
            if (k_norm) normalise(k, k_norm, k, dim, eps);
            rotate(k, c, s, keys + slots[row] + h * head, dim);
            std::memcpy(values + slots[row] + h * head, v, dim * 2);
        }
    });
}
