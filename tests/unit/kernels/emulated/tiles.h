// The tiles and the bfloat16 instructions of processors with AMX, for those that have AVX-512 alone. See amx_compiler.py.

#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace emulated {

struct Tile {
    int rows = 0, bytes = 0;
    alignas(64) unsigned char data[16][64] = {};
};

inline thread_local Tile tile[8];

inline float wide(uint16_t x) {
    const uint32_t bits = (uint32_t)x << 16;
    float number;
    std::memcpy(&number, &bits, 4);
    return number;
}

inline void configure(const void* setting) {
    const unsigned char* s = (const unsigned char*)setting;
    for (int t = 0; t < 8; t++) {
        tile[t] = Tile{};
        tile[t].bytes = s[16 + 2 * t] | s[17 + 2 * t] << 8;
        tile[t].rows = s[48 + t];
    }
}

inline void load(int t, const void* from, int64_t stride) {
    for (int r = 0; r < tile[t].rows; r++) std::memcpy(tile[t].data[r], (const char*)from + r * stride, tile[t].bytes);
}

inline void store(int t, void* to, int64_t stride) {
    for (int r = 0; r < tile[t].rows; r++) std::memcpy((char*)to + r * stride, tile[t].data[r], tile[t].bytes);
}

inline void zero(int t) { std::memset(tile[t].data, 0, sizeof tile[t].data); }

inline void product(int out, int left, int right) {
    for (int m = 0; m < tile[out].rows; m++) {
        float* c = (float*)tile[out].data[m];
        const uint16_t* a = (const uint16_t*)tile[left].data[m];
        for (int k = 0; k < tile[left].bytes / 4; k++) {
            const uint16_t* b = (const uint16_t*)tile[right].data[k];
            for (int n = 0; n < tile[out].bytes / 4; n++)
                c[n] += wide(a[2 * k]) * wide(b[2 * n]) + wide(a[2 * k + 1]) * wide(b[2 * n + 1]);
        }
    }
}

inline __m256i round16(__m512 x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(up, 16));
}

inline __m512 dot(__m512 sum, __m512i a, __m512i b) {
    const auto low = [](__m512i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)); };
    const auto high = [](__m512i x) { return _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32((int)0xffff0000))); };
    return _mm512_fmadd_ps(high(a), high(b), _mm512_fmadd_ps(low(a), low(b), sum));
}

}  // namespace emulated
