/* MXFP4 quantise-dequantise (QDQ) on a CPU, equal to engine/formats bit for bit.
 *
 * The arithmetic is that of engine/formats: scale.py (integer bump), e2m1.py (rounding), philox.py (noise), hadamard.py
 * (order of the butterflies). Loops run over arrays of a constant length, so that the compiler turns them into vector
 * code; -ffp-contract=off keeps it from fusing multiplications and additions.
 *
 * Work is cut into panels of 32 quantised values x LANES independent blocks:
 *   rows    x is [n, 32]: a panel is LANES blocks, read transposed when there is a Hadamard transform;
 *   columns x is [n, 32, inner]: a panel is LANES neighbouring columns; for 32x32 tiles blocks of 32 columns share amax.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define BLOCK 32
#define LANES 32
#define INLINE static inline __attribute__((always_inline))

typedef struct {
    const void *x;
    void *out;
    int64_t outer;          /* groups of 32 along the quantised axis */
    int64_t inner;          /* values between two neighbours along it; 1 for rows */
    int32_t in_bf16, out_bf16;
    int32_t bump;           /* added to the bits of amax, target exponent included */
    int32_t tiled;          /* 32x32 tiles */
    int32_t sr, clip;
    uint32_t key_low, key_high;
    uint64_t first_element; /* index of x's first value in the logical operand, for the noise */
    int32_t stages;         /* Hadamard stages, 0 for none */
    const int32_t *permutation; /* [stages, 32] */
    const float *factors;       /* [stages, 32], +-1/sqrt(32) */
} Job;

INLINE uint32_t bits_of(float value) { uint32_t b; memcpy(&b, &value, 4); return b; }
INLINE float float_of(uint32_t b) { float value; memcpy(&value, &b, 4); return value; }
INLINE int32_t max_i32(int32_t a, int32_t b) { return a > b ? a : b; }
INLINE int32_t min_i32(int32_t a, int32_t b) { return a < b ? a : b; }
INLINE float min_f32(float a, float b) { return a < b ? a : b; }
INLINE float max_f32(float a, float b) { return a > b ? a : b; }

INLINE void load(float *to, const void *x, int64_t at, int n, int bf16) {
    if (bf16) {
        const uint16_t *from = (const uint16_t *)x + at;
        for (int i = 0; i < n; i++) to[i] = float_of((uint32_t)from[i] << 16);
    } else {
        memcpy(to, (const float *)x + at, (size_t)n * 4);
    }
}

/* Values are exact in bfloat16 unless clipped; NaN is canonical, so its upper half is a NaN too. */
INLINE void store(void *out, int64_t at, const float *from, int n, int bf16, int exact) {
    if (bf16) {
        uint16_t *to = (uint16_t *)out + at;
        if (exact) {
            for (int i = 0; i < n; i++) to[i] = (uint16_t)(bits_of(from[i]) >> 16);
        } else {
            for (int i = 0; i < n; i++) {
                uint32_t b = bits_of(from[i]);
                uint32_t nearest = (b + 0x7fff + ((b >> 16) & 1)) >> 16;
                to[i] = (uint16_t)(from[i] != from[i] ? b >> 16 : nearest);
            }
        }
    } else {
        memcpy((float *)out + at, from, (size_t)n * 4);
    }
}

/* Philox-4x32-7 of the counters first .. first + 7 (engine/formats/philox.py): 64 lanes of 16 bits. */
INLINE void philox8(uint64_t first, uint32_t k0, uint32_t k1, uint16_t *lanes) {
    uint32_t c0[8], c1[8], c2[8], c3[8];
    for (int i = 0; i < 8; i++) {
        c0[i] = (uint32_t)(first + (uint64_t)i);
        c1[i] = (uint32_t)((first + (uint64_t)i) >> 32);
        c2[i] = c3[i] = 0;
    }
    for (int round = 0; round < 7; round++) {
        for (int i = 0; i < 8; i++) {
            uint64_t p0 = (uint64_t)c0[i] * 0xD2511F53u, p1 = (uint64_t)c2[i] * 0xCD9E8D57u;
            c0[i] = (uint32_t)(p1 >> 32) ^ c1[i] ^ k0;
            c2[i] = (uint32_t)(p0 >> 32) ^ c3[i] ^ k1;
            c1[i] = (uint32_t)p1;
            c3[i] = (uint32_t)p0;
        }
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    uint32_t words[32];
    for (int i = 0; i < 8; i++) {
        words[4 * i] = c0[i];
        words[4 * i + 1] = c1[i];
        words[4 * i + 2] = c2[i];
        words[4 * i + 3] = c3[i];
    }
    memcpy(lanes, words, sizeof words); /* little endian: a word is its low lane, then its high one */
}

/* The noise of the elements at .. at + n - 1; room for n + 72 lanes. Returns where the first one lies. */
INLINE const uint16_t *noise(const Job *job, uint64_t at, int n, uint16_t *room) {
    uint64_t counter = at / 8;
    int skip = (int)(at % 8);
    for (int done = 0; done < n + skip; done += 64, counter += 8) philox8(counter, job->key_low, job->key_high, room + done);
    return room + skip;
}

/* One value over its scale to E2M1: round to nearest, ties to even (e2m1.round_nearest_). */
INLINE float nearest(float q) {
    uint32_t b = bits_of(q);
    float spacing = float_of((uint32_t)max_i32((int32_t)(b & 0x7F800000u), 0x3F800000)) * 6291456.0f; /* 1.5 * 2^22 */
    float rounded = (q + spacing) - spacing;
    rounded = max_f32(min_f32(rounded, 6.0f), -6.0f);
    return float_of((bits_of(rounded) & 0x7FFFFFFFu) | (b & 0x80000000u));
}

/* The same with stochastic rounding on 16 noise bits (e2m1.round_stochastic_). */
INLINE float stochastic(float q, uint16_t lane) {
    uint32_t b = bits_of(q);
    float a = min_f32(float_of(b & 0x7FFFFFFFu), 6.0f);
    int32_t centred = ((int32_t)lane << 6) | 32;
    float below = ceilf((float)centred * -2.384185791015625e-7f + 2.0f * min_f32(a, 1.0f)); /* 2^-22 */
    uint32_t above = (bits_of(max_f32(a, 1.0f)) + (uint32_t)centred) & 0xFFC00000u;
    float rounded = (float_of(above) - 1.0f) + 0.5f * below;
    return float_of(bits_of(rounded) | (b & 0x80000000u));
}

typedef struct { float reciprocal, scale; } Scale;

INLINE int32_t code_of(int32_t amax_bits, int32_t bump) {
    int32_t code = min_i32(max_i32((amax_bits + bump) >> 23, 0), 252);
    return amax_bits >= 0x7F800000 ? 255 : code;
}

/* 2^(127 - S) and 2^(S - 127); a non-finite block has the scale NaN. */
INLINE Scale scale_of(int32_t code) {
    Scale s;
    s.reciprocal = float_of((uint32_t)(254 - min_i32(code, 252)) << 23);
    s.scale = float_of(code == 255 ? 0x7FC00000u : code == 0 ? 0x00400000u : (uint32_t)code << 23);
    return s;
}

INLINE float finish(float rounded, float scale, int clip, float limit) {
    float value = rounded * scale;
    if (clip) {
        value *= 1.33333337306976318359375f; /* fp32(4/3) */
        value = value > limit ? limit : value < -limit ? -limit : value;
    }
    return value;
}

/* A NaN scale makes NaN of whatever it multiplies; write the canonical one. */
INLINE void qdq_lane_array(float *v, const float *reciprocal, const float *scale, const uint16_t *lanes, int n, int sr,
                           int clip, float limit) {
    for (int i = 0; i < n; i++) {
        float q = (clip ? v[i] * 0.75f : v[i]) * reciprocal[i];
        float value = finish(sr ? stochastic(q, lanes[i]) : nearest(q), scale[i], clip, limit);
        v[i] = scale[i] != scale[i] ? float_of(0x7FC00000u) : value;
    }
}

INLINE void butterflies(float (*v)[LANES], float (*w)[LANES]) {
    for (int stride = 1; stride < BLOCK; stride *= 2) {
        for (int base = 0; base < BLOCK; base += 2 * stride)
            for (int j = base; j < base + stride; j++)
                for (int c = 0; c < LANES; c++) {
                    float a = v[j][c], b = v[j + stride][c];
                    v[j][c] = a + b;
                    v[j + stride][c] = a - b;
                }
    }
    (void)w;
}

/* y[p(i)] = d[i] sum_j S[i, j] x[p(j)] / sqrt(32), stage after stage, on LANES columns at once. */
INLINE void hadamard(const Job *job, float (*v)[LANES], float (*w)[LANES]) {
    for (int stage = 0; stage < job->stages; stage++) {
        const int32_t *p = job->permutation + stage * BLOCK;
        const float *d = job->factors + stage * BLOCK;
        for (int j = 0; j < BLOCK; j++) memcpy(w[j], v[p[j]], sizeof w[j]);
        butterflies(w, v);
        for (int j = 0; j < BLOCK; j++)
            for (int c = 0; c < LANES; c++) v[p[j]][c] = w[j][c] * d[j];
    }
}

/* Rows without a transform: block after block. */
INLINE int64_t rows_plain(const Job *job, int64_t from, int64_t to, int in_bf16, int out_bf16, int sr, int clip,
                          float limit) {
    int64_t bad = 0;
    float v[4 * BLOCK], reciprocal[4 * BLOCK], scale[4 * BLOCK];
    uint16_t room[4 * BLOCK + 72];
    for (int64_t block = from; block < to; block += 4) {
        int blocks = to - block < 4 ? (int)(to - block) : 4;
        int64_t at = block * BLOCK;
        const uint16_t *lanes = room;
        if (sr) lanes = noise(job, job->first_element + (uint64_t)at, blocks * BLOCK, room);
        for (int k = 0; k < blocks; k++) {
            float *u = v + k * BLOCK;
            load(u, job->x, at + k * BLOCK, BLOCK, in_bf16);
            int32_t amax = 0;
            for (int i = 0; i < BLOCK; i++) amax = max_i32(amax, (int32_t)(bits_of(u[i]) & 0x7FFFFFFFu));
            int32_t code = code_of(amax, job->bump);
            bad += code == 255;
            Scale s = scale_of(code);
            for (int i = 0; i < BLOCK; i++) reciprocal[k * BLOCK + i] = s.reciprocal, scale[k * BLOCK + i] = s.scale;
            qdq_lane_array(u, reciprocal + k * BLOCK, scale + k * BLOCK, lanes + k * BLOCK, BLOCK, sr, clip, limit);
            store(job->out, at + k * BLOCK, u, BLOCK, out_bf16, !clip);
        }
    }
    return bad;
}

/* Rows with a transform: LANES blocks at a time, transposed. */
INLINE int64_t rows_hadamard(const Job *job, int64_t from, int64_t to, int in_bf16, int out_bf16, int sr, int clip,
                             float limit) {
    int64_t bad = 0;
    float v[BLOCK][LANES], w[BLOCK][LANES], line[LANES * BLOCK], reciprocal[LANES], scale[LANES];
    uint16_t room[LANES * BLOCK + 72], turned[LANES];
    for (int64_t block = from; block < to; block += LANES) {
        int blocks = to - block < LANES ? (int)(to - block) : LANES;
        int64_t at = block * BLOCK;
        if (blocks < LANES) memset(line, 0, sizeof line);
        load(line, job->x, at, blocks * BLOCK, in_bf16);
        for (int j = 0; j < BLOCK; j++)
            for (int c = 0; c < LANES; c++) v[j][c] = line[c * BLOCK + j];
        hadamard(job, v, w);
        int32_t amax[LANES] = {0};
        for (int j = 0; j < BLOCK; j++)
            for (int c = 0; c < LANES; c++) amax[c] = max_i32(amax[c], (int32_t)(bits_of(v[j][c]) & 0x7FFFFFFFu));
        for (int c = 0; c < LANES; c++) {
            int32_t code = code_of(amax[c], job->bump);
            bad += code == 255;
            Scale s = scale_of(code);
            reciprocal[c] = s.reciprocal, scale[c] = s.scale;
        }
        const uint16_t *lanes = room;
        if (sr) lanes = noise(job, job->first_element + (uint64_t)at, LANES * BLOCK, room);
        for (int j = 0; j < BLOCK; j++) {
            if (sr)
                for (int c = 0; c < LANES; c++) turned[c] = lanes[c * BLOCK + j];
            qdq_lane_array(v[j], reciprocal, scale, turned, LANES, sr, clip, limit);
        }
        for (int c = 0; c < LANES; c++)
            for (int j = 0; j < BLOCK; j++) line[c * BLOCK + j] = v[j][c];
        store(job->out, at, line, blocks * BLOCK, out_bf16, !clip);
    }
    return bad;
}

/* Columns from .. to (panels of LANES) of one group of 32 along the quantised axis. */
INLINE int64_t columns(const Job *job, int64_t group, int64_t panel, int in_bf16, int out_bf16, int sr, int clip,
                       float limit) {
    int64_t bad = 0, inner = job->inner, first = panel * LANES, start = group * BLOCK * inner + first;
    int n = inner - first < LANES ? (int)(inner - first) : LANES;
    float v[BLOCK][LANES], w[BLOCK][LANES], reciprocal[LANES], scale[LANES];
    uint16_t room[LANES + 72];
    int32_t amax[LANES] = {0};
    if (n < LANES) memset(v, 0, sizeof v);
    for (int j = 0; j < BLOCK; j++) {
        if (n == LANES) load(v[j], job->x, start + j * inner, LANES, in_bf16);
        else load(v[j], job->x, start + j * inner, n, in_bf16);
    }
    if (job->stages) hadamard(job, v, w);
    for (int j = 0; j < BLOCK; j++)
        for (int c = 0; c < LANES; c++) amax[c] = max_i32(amax[c], (int32_t)(bits_of(v[j][c]) & 0x7FFFFFFFu));
    if (job->tiled) { /* LANES is the width of a tile */
        int32_t most = 0;
        for (int c = 0; c < LANES; c++) most = max_i32(most, amax[c]);
        for (int c = 0; c < LANES; c++) amax[c] = most;
        bad += code_of(most, job->bump) == 255;
    }
    for (int c = 0; c < LANES; c++) {
        int32_t code = code_of(amax[c], job->bump);
        if (!job->tiled) bad += code == 255;
        Scale s = scale_of(code);
        reciprocal[c] = s.reciprocal, scale[c] = s.scale;
    }
    for (int j = 0; j < BLOCK; j++) {
        int64_t at = start + j * inner;
        const uint16_t *lanes = room;
        if (sr) lanes = noise(job, job->first_element + (uint64_t)at, LANES, room);
        qdq_lane_array(v[j], reciprocal, scale, lanes, LANES, sr, clip, limit);
        if (n == LANES) store(job->out, at, v[j], LANES, out_bf16, !clip);
        else store(job->out, at, v[j], n, out_bf16, !clip);
    }
    return bad;
}

INLINE int64_t run(const Job *job, int in_bf16, int out_bf16, int sr, int clip) {
    float limit = out_bf16 ? float_of(0x7F7F0000u) : float_of(0x7F7FFFFFu);
    int64_t bad = 0;
    if (job->inner == 1) {
        int64_t piece = 1024, pieces = (job->outer + piece - 1) / piece;
#pragma omp parallel for schedule(static) reduction(+ : bad) if (pieces > 1)
        for (int64_t i = 0; i < pieces; i++) {
            int64_t from = i * piece, to = from + piece < job->outer ? from + piece : job->outer;
            bad += job->stages ? rows_hadamard(job, from, to, in_bf16, out_bf16, sr, clip, limit)
                               : rows_plain(job, from, to, in_bf16, out_bf16, sr, clip, limit);
        }
    } else {
        int64_t panels = (job->inner + LANES - 1) / LANES;
#pragma omp parallel for schedule(static) reduction(+ : bad) if (job->outer * panels > 32)
        for (int64_t i = 0; i < job->outer * panels; i++)
            bad += columns(job, i / panels, i % panels, in_bf16, out_bf16, sr, clip, limit);
    }
    return bad;
}

/* Returns the number of non-finite blocks. */
int64_t lptctl_qdq(const Job *job) {
    int kind = job->in_bf16 * 8 + job->out_bf16 * 4 + job->sr * 2 + job->clip;
    switch (kind) {
#define CASE(k) case k: return run(job, (k) >> 3 & 1, (k) >> 2 & 1, (k) >> 1 & 1, (k) & 1);
        CASE(0) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7)
        CASE(8) CASE(9) CASE(10) CASE(11) CASE(12) CASE(13) CASE(14) CASE(15)
    }
    return -1;
}
