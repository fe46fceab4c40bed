// bfloat16 operators for x86 with AMX and AVX-512, which torch has in several passes or without fetching weights
// ahead. device/ops/cpu_kernels.py compiles them and checks shapes and strides; strides here are in elements.

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

using bf16 = uint16_t;

constexpr int kStrip = 32;            // outputs that one pass over K makes: two tiles
constexpr int kTile = 16;             // rows and columns of a tile of results; rows of a tile of inputs
constexpr int kAhead = 4096;  // bytes of weights between a load and what is fetched for later

inline __m512 widen(__m256i halves) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

inline __m512 load(const bf16* from) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))); }

inline __m512 load(const bf16* from, __mmask16 mask) { return widen(_mm256_maskz_loadu_epi16(mask, from)); }

inline void store(bf16* to, __m512 values, __mmask16 mask = 0xffff) {
    _mm256_mask_storeu_epi16(to, mask, (__m256i)_mm512_cvtneps_pbh(values));
}

inline __mmask16 first(int64_t count) { return count >= 16 ? 0xffff : (__mmask16)((1u << count) - 1); }

inline __m512 exponential(__m512 x) {
    x = _mm512_max_ps(_mm512_min_ps(x, _mm512_set1_ps(88.0f)), _mm512_set1_ps(-104.0f));
    const __m512 power = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
    __m512 r = _mm512_fnmadd_ps(power, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(power, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    for (float factor : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 0.5f, 1.0f, 1.0f})
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(factor));
    return _mm512_scalef_ps(p, power);
}

enum Activation { kNone, kSilu, kGeluTanh };

inline __m512 activate(__m512 x, int activation) {  // all are x * sigmoid(f(x))
    if (activation == kNone) return x;
    __m512 f = x;
    if (activation == kGeluTanh) {
        const __m512 cubic = _mm512_fmadd_ps(_mm512_mul_ps(x, x), _mm512_set1_ps(0.044715f), _mm512_set1_ps(1.0f));
        f = _mm512_mul_ps(_mm512_mul_ps(x, cubic), _mm512_set1_ps(1.5957691216f));
    }
    const __m512 one = _mm512_set1_ps(1.0f);
    return _mm512_div_ps(x, _mm512_add_ps(one, exponential(_mm512_sub_ps(_mm512_setzero_ps(), f))));
}

struct Shape {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};

// Tiles 0 to 3: results of rows 0-15 and 16-31 by columns 0-15 and 16-31; 4, 5: inputs; 6, 7: weights.
inline void configure(int rows) {
    alignas(64) Shape shape;
    const int upper = std::min(rows, kTile), lower = rows - upper;
    const int of_tile[8] = {upper, upper, lower, lower, upper, lower, kTile, kTile};
    for (int tile = 0; tile < 8; tile++)
        if (of_tile[tile]) shape.rows[tile] = of_tile[tile], shape.row_bytes[tile] = 64;
    _tile_loadconfig(&shape);
}

// 32 (or, with Both false, 16) rows of inputs by one strip of weights; sums [32][32].
template <bool Both>
inline void multiply(const bf16* x, int64_t stride, const bf16* weight, int64_t depth, float* sums) {
    _tile_zero(0);
    _tile_zero(1);
    if (Both) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t k = 0; k < depth; k += 32, weight += 32 * kStrip) {
        for (int line = 0; line < 2048; line += 64)
            _mm_prefetch(reinterpret_cast<const char*>(weight) + kAhead + line, _MM_HINT_T0);
        _tile_loadd(4, x + k, 2 * stride);
        _tile_loadd(6, weight, 4 * kStrip);
        _tile_loadd(7, weight + kStrip, 4 * kStrip);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (Both) {
            _tile_loadd(5, x + kTile * stride + k, 2 * stride);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, 4 * kStrip);
    _tile_stored(1, sums + kTile, 4 * kStrip);
    if (Both) {
        _tile_stored(2, sums + kTile * kStrip, 4 * kStrip);
        _tile_stored(3, sums + kTile * kStrip + kTile, 4 * kStrip);
    }
}

}  // namespace

extern "C" {

struct Product {
    const bf16* x;         // [rows, depth], rows x_stride apart
    const bf16* weight;  // [ceil(width / 32)][ceil(depth / 32)][16][32][2], as oneDNN packs for AMX
    const bf16* bias;    // [width] or null
    const bf16* other;   // [rows, width] to combine the result with, or null
    bf16* out;           // [rows, width]
    int64_t x_stride, rows, width, depth, activation, multiplies;
    int64_t threads;
};

void epd_linear(const Product* p) {
    const int64_t strips = (p->width + kStrip - 1) / kStrip;
#pragma omp parallel for num_threads(p->threads) schedule(static)
    for (int64_t part = 0; part < p->threads; part++) {
        alignas(64) float sums[kStrip * kStrip];
        const int64_t end = strips * (part + 1) / p->threads;
        int configured = 0;
        for (int64_t strip = strips * part / p->threads; strip < end; strip++) {
            const bf16* weight = p->weight + strip * kStrip * p->depth;
            for (int64_t row = 0; row < p->rows; row += kStrip) {
                const int rows = (int)std::min<int64_t>(kStrip, p->rows - row);
                if (rows != configured) configure(configured = rows);
                const bf16* x = p->x + row * p->x_stride;
                if (rows > kTile) multiply<true>(x, p->x_stride, weight, p->depth, sums);
                else multiply<false>(x, p->x_stride, weight, p->depth, sums);
                for (int64_t half = 0; half < 2; half++) {
                    const int64_t column = strip * kStrip + half * kTile;
                    if (column >= p->width) break;
                    const __mmask16 mask = first(p->width - column);
                    const __m512 bias = p->bias ? load(p->bias + column, mask) : _mm512_setzero_ps();
                    for (int i = 0; i < rows; i++) {
                        const int64_t at = (row + i) * p->width + column;
                        __m512 sum = _mm512_load_ps(sums + i * kStrip + half * kTile);
                        sum = activate(_mm512_add_ps(sum, bias), (int)p->activation);
                        if (p->other) {
                            const __m512 other = load(p->other + at, mask);
                            sum = p->multiplies ? _mm512_mul_ps(sum, other) : _mm512_add_ps(sum, other);
                        }
                        store(p->out + at, sum, mask);
                    }
                }
            }
        }
        if (configured) _tile_release();
    }
}

struct Decode {
    const bf16 *query, *keys, *values;  // [batch, query_heads, dim]; [blocks, block_size, kv_heads, dim]
    const int32_t* tables;              // [batch, table_stride]
    const int64_t* lengths;             // [batch]
    bf16* out;                          // [batch, query_heads, dim]
    int64_t query_stride, table_stride, batch, query_heads, kv_heads, dim, block_size;
    float scale;
    int64_t threads;
};

// The last token of each sequence over its pages, where they lie. The (at most 16) query heads of a KV head are the
// lanes of a vector: scores need no sum over lanes, and each key is read once.
void epd_decode(const Decode* p) {
    constexpr int kLanes = 16, kChunk = 128, kMaxDim = 256;
    const int64_t group = p->query_heads / p->kv_heads, row = p->kv_heads * p->dim;
#pragma omp parallel for num_threads(p->threads) schedule(dynamic)
    for (int64_t item = 0; item < p->batch * p->kv_heads; item++) {
        const int64_t sequence = item / p->kv_heads, head = item % p->kv_heads, length = p->lengths[sequence];
        const int32_t* table = p->tables + sequence * p->table_stride;
        alignas(64) uint32_t lanes[kMaxDim / 2][kLanes] = {};  // pairs of dimensions of all queries
        alignas(64) float scores[kChunk][kLanes], sums[kLanes][kMaxDim] = {}, factors[kLanes];
        for (int64_t g = 0; g < group; g++) {
            const bf16* query = p->query + sequence * p->query_stride + (head * group + g) * p->dim;
            for (int64_t pair = 0; pair < p->dim / 2; pair++) std::memcpy(&lanes[pair][g], query + 2 * pair, 4);
        }
        __m512 best = _mm512_set1_ps(-INFINITY), weight = _mm512_setzero_ps();
        const auto page = [&](const bf16* base, int64_t token) {
            return base + (table[token / p->block_size] * p->block_size + token % p->block_size) * row + head * p->dim;
        };
        for (int64_t start = 0; start < length; start += kChunk) {
            const int64_t count = std::min<int64_t>(kChunk, length - start);
            __m512 highest = best;
            for (int64_t t = 0; t < count; t += 4) {
                const bf16* key[4];
                for (int j = 0; j < 4; j++) key[j] = page(p->keys, start + std::min(t + j, count - 1));
                __m512 sum[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
                for (int64_t pair = 0; pair < p->dim / 2; pair++) {
                    const __m512bh query = (__m512bh)_mm512_load_si512(lanes[pair]);
                    for (int j = 0; j < 4; j++) {
                        int32_t both;
                        std::memcpy(&both, key[j] + 2 * pair, 4);
                        sum[j] = _mm512_dpbf16_ps(sum[j], query, (__m512bh)_mm512_set1_epi32(both));
                    }
                }
                for (int j = 0; j < 4 && t + j < count; j++) {
                    sum[j] = _mm512_mul_ps(sum[j], _mm512_set1_ps(p->scale));
                    _mm512_store_ps(scores[t + j], sum[j]);
                    highest = _mm512_max_ps(highest, sum[j]);
                }
            }
            const __m512 shrink = exponential(_mm512_sub_ps(best, highest));
            weight = _mm512_mul_ps(weight, shrink);
            for (int64_t t = 0; t < count; t++) {
                const __m512 share = exponential(_mm512_sub_ps(_mm512_load_ps(scores[t]), highest));
                weight = _mm512_add_ps(weight, share);
                _mm512_store_ps(scores[t], share);
            }
            best = highest;
            _mm512_store_ps(factors, shrink);
            for (int64_t low = 0; low < group; low += 8) {
                const int64_t count_g = std::min<int64_t>(8, group - low);
                for (int64_t d = 0; d < p->dim; d += 32) {
                    __m512 sum[8][2];
                    for (int64_t g = 0; g < 8; g++)
                        for (int half = 0; half < 2; half++)
                            sum[g][half] = _mm512_mul_ps(_mm512_load_ps(&sums[low + g][d + 16 * half]), _mm512_set1_ps(factors[low + g]));
                    for (int64_t t = 0; t < count; t++) {
                        const bf16* value = page(p->values, start + t) + d;
                        const __m512 left = load(value), right = load(value + 16);
                        for (int64_t g = 0; g < 8; g++) {
                            const __m512 share = _mm512_set1_ps(scores[t][low + g]);
                            sum[g][0] = _mm512_fmadd_ps(share, left, sum[g][0]);
                            sum[g][1] = _mm512_fmadd_ps(share, right, sum[g][1]);
                        }
                    }
                    for (int64_t g = 0; g < count_g; g++)
                        for (int half = 0; half < 2; half++) _mm512_store_ps(&sums[low + g][d + 16 * half], sum[g][half]);
                }
            }
        }
        _mm512_store_ps(factors, _mm512_div_ps(_mm512_set1_ps(1.0f), weight));
        for (int64_t g = 0; g < group; g++)
            for (int64_t d = 0; d < p->dim; d += 16)
                store(p->out + (sequence * p->query_heads + head * group + g) * p->dim + d,
                      _mm512_mul_ps(_mm512_load_ps(&sums[g][d]), _mm512_set1_ps(factors[g])));
    }
}

}  // extern "C"
