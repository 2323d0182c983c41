// Paged attention for CPUs with AVX512-BF16: prefill and decode with one reduction order per row.
//
// A row (one query token, one head) walks its pages from 0, 64 keys at a time, with an online
// softmax. Scores are summed over pairs of dims in order, values over pairs of keys in order; rows
// share registers, never sums. So a row's bits depend on its query and its keys alone, whatever
// rows are computed beside it, in prefill or decode. Pages behind a row change nothing: every
// weight in them is 0 and the correction factor is exactly 1.

#include "common.h"

#include <vector>

namespace {

constexpr int kPage = 64;        // keys of a page
constexpr int kRows = 4;         // rows that share registers
constexpr int kTokens = 32;      // query tokens of one work item
constexpr float kNone = -INFINITY;

struct Shape {
    const uint16_t *q, *k, *v;
    uint16_t *out;
    int64_t q_row, out_row;      // elements between query tokens
    int64_t block, head;         // elements between KV blocks, KV heads
    const int64_t *table;        // block tables of all spans, one after the other
    int heads, kv_heads, dim, window;
    float scale;
};

// e^x for x <= 0 and -inf; 0 below -87; NaN stays NaN.
inline __m512 exp_negative(__m512 x) {
    const __mmask16 tiny = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_LT_OQ);
    const __m512 power = _mm512_mul_ps(_mm512_max_ps(_mm512_set1_ps(-87.0f), x),
                                       _mm512_set1_ps(1.44269504089f));
    return _mm512_maskz_mov_ps(~tiny, exp2_ps(power));
}

inline __m512 dot(__m512 sum, __m512i pairs, uint32_t pair) {
    return _mm512_dpbf16_ps(sum, (__m512bh)pairs, (__m512bh)_mm512_set1_epi32(pair));
}

// K page [64][dim] -> [dim / 2][64] pairs, by 16 x 16 transposes of 32-bit pairs.
void pack_keys(const uint16_t *page, int dim, uint32_t *packed) {
    for (int key = 0; key < kPage; key += 16)
        for (int pair = 0; pair < dim / 2; pair += 16)
            transpose(page + key * dim + pair * 2, dim * 2, packed + pair * kPage + key, kPage * 4);
}

// V page [64][dim] -> [32][dim] pairs of neighbouring keys. Keys from `used` on are 0: a weight of 0
// does not hide what is no number.
void pack_values(const uint16_t *page, int dim, int64_t used, uint32_t *packed) {
    for (int pair = 0; pair < kPage / 2; ++pair)
        for (int d = 0; d < dim; d += 16) {
            const uint16_t *low = page + 2 * pair * dim + d;
            const __mmask16 first = 2 * pair < used ? 0xffff : 0, second = 2 * pair + 1 < used ? 0xffff : 0;
            const __m512i a = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first, low));
            const __m512i b = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(second, low + dim));
            const __m512i both = _mm512_or_si512(a, _mm512_slli_epi32(b, 16));
            _mm512_storeu_si512(packed + pair * dim + d, both);
        }
}

struct Row {
    const uint16_t *q;
    uint16_t *out;
    int64_t position;
    float most, sum;
    float *acc;                  // [dim]
    uint32_t weights[kPage / 2]; // pairs of bf16
};

// Softmax weights of one row over one page; false when the row sees no key of it.
bool weigh(const Shape &s, Row &row, __m512 *scores, int64_t first, float *correction) {
    if (first > row.position) return false;
    if (s.window && first + kPage - 1 <= row.position - s.window) return false;
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const int last = (int)std::min<int64_t>(row.position - first, kPage);
    const int low = s.window ? (int)std::max<int64_t>(row.position - s.window - first, -1) : -1;
    for (int i = 0; i < 4; ++i) {
        const __m512i key = _mm512_add_epi32(lanes, _mm512_set1_epi32(16 * i));
        const __mmask16 seen = _mm512_cmple_epi32_mask(key, _mm512_set1_epi32(last)) &
                               _mm512_cmpgt_epi32_mask(key, _mm512_set1_epi32(low));
        const __m512 scaled = _mm512_mul_ps(scores[i], _mm512_set1_ps(s.scale));
        scores[i] = _mm512_mask_mov_ps(_mm512_set1_ps(kNone), seen, scaled);
    }
    const __m512 top = _mm512_max_ps(_mm512_max_ps(scores[0], scores[1]),
                                     _mm512_max_ps(scores[2], scores[3]));
    const float most = std::max(row.most, _mm512_reduce_max_ps(top));
    __m512 total = _mm512_setzero_ps();
    for (int i = 0; i < 4; ++i) {
        const __m512 w = exp_negative(_mm512_sub_ps(scores[i], _mm512_set1_ps(most)));
        total = _mm512_add_ps(total, w);
        _mm256_storeu_si256((__m256i *)row.weights + i, (__m256i)_mm512_cvtneps_pbh(w));
    }
    const __m512 old = exp_negative(_mm512_set1_ps(row.most - most));
    *correction = _mm512_cvtss_f32(old);
    row.sum = row.sum * *correction + _mm512_reduce_add_ps(total);
    row.most = most;
    return true;
}

template <int R>
void page(const Shape &s, Row *rows, const uint32_t *keys, const uint32_t *values, int64_t first) {
    __m512 scores[R][4];
    for (int r = 0; r < R; ++r)
        for (int i = 0; i < 4; ++i) scores[r][i] = _mm512_setzero_ps();
    for (int pair = 0; pair < s.dim / 2; ++pair) {
        __m512i k[4];
        for (int i = 0; i < 4; ++i) k[i] = _mm512_loadu_si512(keys + pair * kPage + 16 * i);
        for (int r = 0; r < R; ++r) {
            uint32_t q;
            std::memcpy(&q, rows[r].q + 2 * pair, 4);
            for (int i = 0; i < 4; ++i) scores[r][i] = dot(scores[r][i], k[i], q);
        }
    }
    float correction[R];
    bool seen[R];
    for (int r = 0; r < R; ++r) seen[r] = weigh(s, rows[r], scores[r], first, &correction[r]);
    for (int d = 0; d < s.dim; d += 32) {
        __m512 acc[R][2];
        for (int r = 0; r < R; ++r)
            for (int i = 0; i < 2; ++i)
                acc[r][i] = _mm512_mul_ps(_mm512_loadu_ps(rows[r].acc + d + 16 * i),
                                          _mm512_set1_ps(seen[r] ? correction[r] : 1.0f));
        for (int pair = 0; pair < kPage / 2; ++pair) {
            const __m512i v0 = _mm512_loadu_si512(values + pair * s.dim + d);
            const __m512i v1 = _mm512_loadu_si512(values + pair * s.dim + d + 16);
            for (int r = 0; r < R; ++r) {
                acc[r][0] = dot(acc[r][0], v0, rows[r].weights[pair]);
                acc[r][1] = dot(acc[r][1], v1, rows[r].weights[pair]);
            }
        }
        for (int r = 0; r < R; ++r)
            if (seen[r])
                for (int i = 0; i < 2; ++i)
                    _mm512_storeu_ps(rows[r].acc + d + 16 * i, acc[r][i]);
    }
}

void finish(const Shape &s, const Row &row) {
    const __m512 inverse = _mm512_set1_ps(1.0f / row.sum);
    for (int d = 0; d < s.dim; d += 16) {
        const __m512 value = _mm512_mul_ps(_mm512_loadu_ps(row.acc + d), inverse);
        _mm256_storeu_si256((__m256i *)(row.out + d), (__m256i)_mm512_cvtneps_pbh(value));
    }
}

// Query tokens `token`..`token + count` of a span that starts at position `start`, one KV head.
void work(const Shape &s, int64_t token, int count, int64_t start, const int64_t *table, int head) {
    thread_local std::vector<uint32_t> keys, values;
    thread_local std::vector<float> acc;
    thread_local std::vector<Row> rows;
    const int group = s.heads / s.kv_heads, total = count * group;
    keys.resize(s.dim / 2 * kPage);
    values.resize(kPage / 2 * s.dim);
    acc.assign((size_t)total * s.dim, 0.0f);
    rows.resize(total);
    for (int i = 0; i < total; ++i) {
        const int64_t t = token + i / group, column = (int64_t)(head * group + i % group) * s.dim;
        Row &row = rows[i];
        row.q = s.q + t * s.q_row + column;
        row.out = s.out + t * s.out_row + column;
        row.position = start + i / group;
        row.most = kNone;
        row.sum = 0.0f;
        row.acc = acc.data() + (size_t)i * s.dim;
    }
    const int64_t oldest = s.window ? std::max<int64_t>(start - s.window + 1, 0) : 0;
    for (int64_t p = oldest / kPage; p <= (start + count - 1) / kPage; ++p) {
        const int64_t base = table[p] * s.block + head * s.head;
        pack_keys(s.k + base, s.dim, keys.data());
        pack_values(s.v + base, s.dim, start + count - p * kPage, values.data());
        int r = 0;
        for (; r + kRows <= total; r += kRows)
            page<kRows>(s, &rows[r], keys.data(), values.data(), p * kPage);
        for (; r < total; ++r) page<1>(s, &rows[r], keys.data(), values.data(), p * kPage);
    }
    for (const Row &row : rows) finish(s, row);
}

}  // namespace

// Spans: (first row of the step, rows, first position, offset of its block table) each.
extern "C" void attention_avx512(const uint16_t *q, const uint16_t *k, const uint16_t *v,
                                uint16_t *out, int64_t q_row, int64_t out_row, int64_t block,
                                int64_t head, const int64_t *spans, int64_t count,
                                const int64_t *table, int heads, int kv_heads, int dim,
                                int window, float scale, int threads) {
    const Shape s{q, k, v, out, q_row, out_row, block, head, table,
                  heads, kv_heads, dim, window, scale};
    struct Item { int64_t row, start, table; int count, head; };
    std::vector<Item> items;
    for (int64_t i = 0; i < count; ++i) {
        const int64_t *span = spans + 4 * i;
        for (int64_t t = 0; t < span[1]; t += kTokens)
            for (int h = 0; h < kv_heads; ++h) {
                const int rows = (int)std::min<int64_t>(kTokens, span[1] - t);
                items.push_back({span[0] + t, span[2] + t, span[3], rows, h});
            }
    }
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < (int64_t)items.size(); ++i) {
        const Item &item = items[i];
        work(s, item.row, item.count, item.start, table + item.table, item.head);
    }
}
