// Short floating-point numbers: their bits as doubles, which hold them exactly, and back.
#pragma once
#include "language.h"

namespace emulator {
// Numbers of a sign, an exponent and a mantissa.
struct Format {
    int mantissa;
    int bias;
    double greatest;
    unsigned infinite; // What becomes of larger numbers,
    unsigned none;     // and of what is no number.
};
constexpr Format BF16 = {7, 127, 0x1.fep127, 0x7f80, 0x7fff};
constexpr Format F16 = {10, 15, 65504.0, 0x7c00, 0x7fff};
// Conversions to e4m3 always saturate.
constexpr Format E4M3 = {3, 7, 448.0, 0x7e, 0x7f};

// The nearest, of two the even one. Exact for every double.
inline unsigned encode(const Format& format, double x) {
    if (isnan(x)) return format.none;
    bool is_short = format.bias < 15; // e4m3: a byte.
    unsigned sign = signbit(x) ? (is_short ? 0x80 : 0x8000) : 0;
    if (x == 0.0) return sign;
    int exponent;
    frexp(x, &exponent); // Of numbers from 0.5 to 1.
    exponent = max(exponent - 1, 1 - format.bias);
    double steps = rint(ldexp(fabs(x), format.mantissa - exponent));
    if (isinf(x) || ldexp(steps, exponent - format.mantissa) > format.greatest) {
        return sign | format.infinite;
    }
    // The leading one of the mantissa, where there is one, adds the last 1 to the exponent.
    unsigned biased = exponent + format.bias - 1;
    return sign | ((biased << format.mantissa) + unsigned(steps));
}

inline float of_bf16(unsigned bits) { return bits_of<float>(bits << 16); }

inline float of_f16(unsigned bits) {
    unsigned magnitude = bits & 0x7fff;
    float x = bits_of<float>(magnitude << 13) * 0x1p112f;
    if (magnitude >= 0x7c00) x = magnitude == 0x7c00 ? INFINITY : NAN;
    return bits & 0x8000 ? -x : x;
}

inline float of_e4m3(unsigned bits) {
    float x = (bits & 0x7f) == 0x7f ? NAN : bits_of<float>((bits & 0x7f) << 20) * 0x1p120f;
    return bits & 0x80 ? -x : x;
}

inline unsigned pair_of(unsigned low, unsigned high) { return (low & 0xffff) | high << 16; }
} // namespace emulator
