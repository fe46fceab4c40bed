// Operators of a step in float32 and bfloat16, which torch has in several passes or for many rows alone. Vectors are
// GCC's, so that this runs on any CPU. device/ops/cpu_kernels.py compiles it and checks shapes; strides are in elements.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <type_traits>
#include <vector>

namespace {

// Lanes of a vector; columns of a tile of kRows rows: its sums fill three quarters of the registers.
#if defined(__AVX512F__)
constexpr int kLanes = 16, kColumns = 6;
#elif defined(__aarch64__)
constexpr int kLanes = 4, kColumns = 6;
#else
constexpr int kLanes = 8, kColumns = 3;
#endif
constexpr int kRows = 4;

// The threads for so many numbers: one where the others would not be there before it is done.
inline int64_t team(int64_t threads, int64_t numbers) { return numbers < 1 << 15 ? 1 : threads; }

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
using bf16 = uint16_t;

inline Floats load(const float* from) {
    Floats values;
    std::memcpy(&values, from, sizeof values);
    return values;
}

inline Floats load(const bf16* from) {
    Halves halves;
    std::memcpy(&halves, from, sizeof halves);
    return (Floats)(__builtin_convertvector(halves, Words) << 16);
}

// Has the compiler keep a vector in a register, where it would load it again for each use.
inline void keep(Floats& values) {
#if defined(__x86_64__)
    asm("" : "+v"(values));
#elif defined(__aarch64__)
    asm("" : "+w"(values));
#endif
}

inline float number(float value) { return value; }

inline float number(bf16 half) {
    const uint32_t word = (uint32_t)half << 16;
    float value;
    std::memcpy(&value, &word, sizeof value);
    return value;
}

inline void store(float* to, Floats values) { std::memcpy(to, &values, sizeof values); }

inline void store(bf16* to, Floats values) {
    const Words words = (Words)values, rounded = words + 0x7fff + ((words >> 16) & 1);
    const Halves halves = __builtin_convertvector((values == values ? rounded : words | 0x400000) >> 16, Halves);
    std::memcpy(to, &halves, sizeof halves);
}

inline void put(float* to, float value) { *to = value; }

inline void put(bf16* to, float value) {
    uint32_t word;
    std::memcpy(&word, &value, sizeof word);
    *to = value == value ? (bf16)((word + 0x7fff + ((word >> 16) & 1)) >> 16) : (bf16)0x7fc0;
}

inline float total(Floats values) {
    for (int half = kLanes / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) values[i] += values[i + half];
    return values[0];
}

// Sums [Rows][Columns] of a tile. The first tile of some columns fetches lines of those behind them.
template <typename T, int Rows, int Columns>
inline void multiply(const float* x, int64_t stride, const T* weight, int64_t depth, float* sums, bool fetches) {
    Floats sum[Rows][Columns] = {};
    int64_t k = 0;
    for (; k + kLanes <= depth; k += kLanes) {
        Floats column[Columns];
        for (int c = 0; c < Columns; c++) {
            column[c] = load(weight + c * depth + k);
            if (fetches) __builtin_prefetch(weight + (Columns + c) * depth + k);
        }
        for (int r = 0; r < Rows; r++) {
            Floats row = load(x + r * stride + k);
            keep(row);
            for (int c = 0; c < Columns; c++) sum[r][c] += row * column[c];
        }
    }
    for (int r = 0; r < Rows; r++)
        for (int c = 0; c < Columns; c++) {
            float all = total(sum[r][c]);
            for (int64_t rest = k; rest < depth; rest++) all += x[r * stride + rest] * number(weight[c * depth + rest]);
            sums[r * Columns + c] = all;
        }
}

// All rows of x by some columns of the weight.
template <typename W, int Columns, typename T>
void multiply_all(const float* x, int64_t stride, const W* weight, const T* bias, T* out, int64_t rows, int64_t width,
                  int64_t depth) {
    float sums[kRows * Columns];
    for (int64_t row = 0; row < rows; row += kRows) {
        const int count = (int)std::min<int64_t>(kRows, rows - row);
        const float* from = x + row * stride;
        const bool fetches = row == 0;
        switch (count) {
            case 1: multiply<W, 1, Columns>(from, stride, weight, depth, sums, fetches); break;
            case 2: multiply<W, 2, Columns>(from, stride, weight, depth, sums, fetches); break;
            case 3: multiply<W, 3, Columns>(from, stride, weight, depth, sums, fetches); break;
            default: multiply<W, kRows, Columns>(from, stride, weight, depth, sums, fetches);
        }
        for (int r = 0; r < count; r++)
            for (int c = 0; c < Columns; c++)
                put(out + (row + r) * width + c, sums[r * Columns + c] + (bias ? number(bias[c]) : 0));
    }
}

template <typename T, int Columns>
void multiply_columns(const float* x, int64_t stride, const T* weight, const T* bias, T* out, int64_t rows,
                      int64_t width, int64_t depth, std::vector<float>& wide) {
    if constexpr (!std::is_same_v<T, float>)
        if (rows > kRows) {  // else the weights are read once
            for (int64_t i = 0; i < Columns * depth; i++) wide[i] = number(weight[i]);
            return multiply_all<float, Columns>(x, stride, wide.data(), bias, out, rows, width, depth);
        }
    multiply_all<T, Columns>(x, stride, weight, bias, out, rows, width, depth);
}

template <typename T>
void product(const float* x, int64_t stride, const T* weight, const T* bias, T* out, int64_t rows, int64_t width,
             int64_t depth, int64_t threads) {
    const int64_t whole = width / kColumns, chunk = std::max<int64_t>(1, whole / (8 * threads));
    threads = team(threads, width * depth);
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> wide(std::is_same_v<T, float> ? 0 : kColumns * depth);
#pragma omp for schedule(dynamic, chunk)
        for (int64_t block = 0; block < whole; block++) {
            const int64_t first = block * kColumns;
            multiply_columns<T, kColumns>(x, stride, weight + first * depth, bias ? bias + first : bias, out + first,
                                          rows, width, depth, wide);
        }
    }
    std::vector<float> wide(depth);
    for (int64_t first = whole * kColumns; first < width; first++)
        multiply_columns<T, 1>(x, stride, weight + first * depth, bias ? bias + first : bias, out + first, rows, width,
                               depth, wide);
}

// x [tokens, heads, width], tokens apart by stride; residual and total are null, or total gets x + residual.
template <typename T>
void norm(const T* x, int64_t stride, const T* residual, const T* weight, T* out, T* total, int64_t tokens,
          int64_t heads, int64_t width, float epsilon, int64_t threads) {
#pragma omp parallel for num_threads(team(threads, tokens * heads * width)) schedule(static)
    for (int64_t row = 0; row < tokens * heads; row++) {
        const T* from = x + row / heads * stride + row % heads * width;
        Floats squares = {};
        for (int64_t i = 0; i < width; i += kLanes) {
            Floats values = load(from + i);
            if (residual) {
                store(total + row * width + i, values + load(residual + row * width + i));
                values = load(total + row * width + i);
            }
            squares += values * values;
        }
        const float scale = 1.0f / std::sqrt(::total(squares) / width + epsilon);
        if (residual) from = total + row * width;
        for (int64_t i = 0; i < width; i += kLanes)
            store(out + row * width + i, load(from + i) * scale * load(weight + i));
    }
}

// states [tokens, heads, dim], tokens apart by stride; cos, sin [tokens, dim]; out is contiguous.
template <typename T>
void rotate(const T* states, int64_t stride, const float* cos, const float* sin, T* out, int64_t tokens, int64_t heads,
            int64_t dim, int64_t threads) {
    const int64_t half = dim / 2;
#pragma omp parallel for num_threads(team(threads, tokens * heads * dim)) schedule(static)
    for (int64_t token = 0; token < tokens; token++)
        for (int64_t head = 0; head < heads; head++)
            for (int64_t i = 0; i < half; i += kLanes) {
                const T* from = states + token * stride + head * dim + i;
                T* to = out + (token * heads + head) * dim + i;
                const float *c = cos + token * dim + i, *s = sin + token * dim + i;
                const Floats a = load(from), b = load(from + half);
                store(to, a * load(c) - b * load(s));
                store(to + half, b * load(c + half) + a * load(s + half));
            }
}

inline Floats exponential(Floats x) {  // of numbers up to 0
    const Floats least = Floats{} - 87.0f;
    x = x > least ? x : least;
    const Words power = (Words)(x * 1.44269504f + 12582912.0f);  // rounded, in the lowest bits
    const Floats rounded = (Floats)power - 12582912.0f;
    const Floats r = x - rounded * 0.693359375f + rounded * 2.12194440e-4f;
    Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    for (float factor : {8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 0.5f, 1.0f, 1.0f}) p = p * r + factor;
    return (Floats)((Words)p + (power << 23));
}

constexpr int kChunk = 64, kMaxGroup = 16, kMaxDim = 256;  // tokens whose scores are kept; query heads of a KV head

template <typename T>
struct Decode {
    const T *query, *keys, *values;  // [batch, query_heads, dim]; [blocks, block_size, kv_heads, dim]
    const int32_t* tables;           // [batch, table_stride]
    const int64_t* lengths;          // [batch]
    T* out;                          // [batch, query_heads, dim]
    int64_t query_stride, table_stride, batch, query_heads, kv_heads, dim, block_size;
    float scale;
    int64_t threads;
};

// Adds the values of some tokens times the shares of Heads query heads to their sums [Heads][kMaxDim].
template <int Heads, typename T>
inline void add_values(const T* const* values, int64_t count, int64_t dim, const float (*shares)[kChunk],
                       float (*sums)[kMaxDim]) {
    for (int64_t d = 0; d < dim; d += kLanes) {
        Floats sum[Heads];
        for (int g = 0; g < Heads; g++) sum[g] = load(&sums[g][d]);
        for (int64_t t = 0; t < count; t++) {
            const Floats value = load(values[t] + d);
            for (int g = 0; g < Heads; g++) sum[g] += value * shares[g][t];
        }
        for (int g = 0; g < Heads; g++) store(&sums[g][d], sum[g]);
    }
}

// The last token of each sequence over its pages, where they lie.
template <typename T>
void decode(const Decode<T>* p) {
    const int64_t group = p->query_heads / p->kv_heads, row = p->kv_heads * p->dim, dim = p->dim;
    const int64_t tokens = std::accumulate(p->lengths, p->lengths + p->batch, (int64_t)0);
#pragma omp parallel for num_threads(team(p->threads, 2 * tokens * row)) schedule(dynamic)
    for (int64_t item = 0; item < p->batch * p->kv_heads; item++) {
        const int64_t sequence = item / p->kv_heads, head = item % p->kv_heads, length = p->lengths[sequence];
        const int32_t* table = p->tables + sequence * p->table_stride;
        float queries[kMaxGroup][kMaxDim], shares[kMaxGroup][kChunk], sums[kMaxGroup][kMaxDim];
        float best[kMaxGroup], weights[kMaxGroup];
        for (int64_t g = 0; g < group; g++) {
            const T* query = p->query + sequence * p->query_stride + (head * group + g) * dim;
            for (int64_t d = 0; d < dim; d++) queries[g][d] = number(query[d]) * p->scale, sums[g][d] = 0;
            best[g] = -INFINITY, weights[g] = 0;
        }
        for (int64_t start = 0; start < length; start += kChunk) {
            const int64_t count = std::min<int64_t>(kChunk, length - start);
            const T *keys[kChunk], *values[kChunk];
            for (int64_t t = 0; t < count; t++) {
                const int64_t at = start + t;
                const int64_t slot = (int64_t)table[at / p->block_size] * p->block_size + at % p->block_size;
                keys[t] = p->keys + slot * row + head * dim, values[t] = p->values + slot * row + head * dim;
            }
            for (int64_t g = 0; g < group; g++) {
                float highest = best[g];
                for (int64_t t = 0; t < count; t++) {
                    Floats sum = {};
                    for (int64_t d = 0; d < dim; d += kLanes) sum += load(&queries[g][d]) * load(keys[t] + d);
                    highest = std::max(highest, shares[g][t] = total(sum));
                }
                for (int64_t t = count; t % kLanes; t++) shares[g][t] = -INFINITY;
                Floats weight = {};
                for (int64_t t = 0; t < count; t += kLanes) {
                    const Floats share = exponential(load(&shares[g][t]) - highest);
                    store(&shares[g][t], share);
                    for (int i = 0; i < kLanes && t + i < count; i++) weight[i] += share[i];
                }
                const float shrink = std::exp(best[g] - highest);
                weights[g] = weights[g] * shrink + total(weight);
                best[g] = highest;
                for (int64_t d = 0; d < dim; d++) sums[g][d] *= shrink;
            }
            for (int64_t g = 0; g < group; g += 4) switch (group - g) {
                case 1: add_values<1>(values, count, dim, shares + g, sums + g); break;
                case 2: add_values<2>(values, count, dim, shares + g, sums + g); break;
                case 3: add_values<3>(values, count, dim, shares + g, sums + g); break;
                default: add_values<4>(values, count, dim, shares + g, sums + g);
            }
        }
        for (int64_t g = 0; g < group; g++)
            for (int64_t d = 0; d < dim; d += kLanes)
                store(p->out + (sequence * p->query_heads + head * group + g) * dim + d, load(&sums[g][d]) / weights[g]);
    }
}

}  // namespace

extern "C" {

// x [rows, depth], rows apart by stride; weight [width, depth]; bias [width] or null; out [rows, width].
void epd_rows_float(const float* x, int64_t stride, const float* weight, const float* bias, float* out, int64_t rows,
                    int64_t width, int64_t depth, int64_t threads) {
    product(x, stride, weight, bias, out, rows, width, depth, threads);
}

void epd_rows_bfloat16(const bf16* x, int64_t stride, const bf16* weight, const bf16* bias, bf16* out, int64_t rows,
                       int64_t width, int64_t depth, int64_t threads) {
    std::vector<float> wide(rows * depth);
    for (int64_t row = 0; row < rows; row++)
        for (int64_t k = 0; k < depth; k++) wide[row * depth + k] = number(x[row * stride + k]);
    product(wide.data(), depth, weight, bias, out, rows, width, depth, threads);
}

int64_t epd_lanes() { return kLanes; }

#define FOR(T, NAME)                                                                                                  \
    void epd_norm_##NAME(const T* x, int64_t stride, const T* residual, const T* weight, T* out, T* total,            \
                         int64_t tokens, int64_t heads, int64_t width, float epsilon, int64_t threads) {              \
        norm(x, stride, residual, weight, out, total, tokens, heads, width, epsilon, threads);                        \
    }                                                                                                                 \
    void epd_rotary_##NAME(const T* states, int64_t stride, const float* cos, const float* sin, T* out,               \
                           int64_t tokens, int64_t heads, int64_t dim, int64_t threads) {                             \
        rotate(states, stride, cos, sin, out, tokens, heads, dim, threads);                                           \
    }                                                                                                                 \
    void epd_decode_##NAME(const Decode<T>* p) { decode(p); }

FOR(float, float)
FOR(bf16, bfloat16)

}  // extern "C"
