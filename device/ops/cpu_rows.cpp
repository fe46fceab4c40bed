// Products of few rows with weights as they are stored, [width, depth], in float32 or bfloat16: each weight is read
// once, and all threads read. Vectors are GCC's, so that this runs on any CPU. device/ops/cpu_kernels.py compiles it.

#include <algorithm>
#include <cstdint>
#include <cstring>
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

}  // extern "C"
