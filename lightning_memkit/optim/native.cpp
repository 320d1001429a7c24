// What the CPU does with bfloat16 weights, in one pass over the memory: join and split them, round stochastically,
// and the whole steps of fused/reference.py.
//
// Plain C++ without torch's headers: it builds in seconds, and the loops are written for the compiler's
// vectoriser. AdamW over bfloat16 moments keeps all of an element in registers; the other steps widen each block to
// float32 on the stack, step it, and narrow it again. Build without contraction (-ffp-contract=off): a fused
// multiply-add rounds elsewhere than the reference, and Kahan's rest lives from where it rounds.

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <system_error>
#include <thread>
#include <type_traits>
#include <vector>

namespace {

constexpr int64_t TILE = 1 << 16;  // as in stochastic_rounding.py
constexpr int64_t BLOCK = 128;  // the float32 copies of a block and the next one's lines fit the innermost cache
constexpr int64_t AHEAD = 4 * BLOCK;

enum Mode { NONE = 0, KAHAN = 1, SPLIT = 2, STOCHASTIC = 3, SPLIT24 = 4 };
enum Rule { ADAMW = 0, SGD = 1, LION = 2 };
enum Flag { FIRST_IS_STOCHASTIC = 1, DECOUPLED = 2, MAXIMIZE = 4, NESTEROV = 8, FIRST_STEP = 16 };

struct Operand {  // every field 8 bytes: Python packs them as 64-bit integers
  uint16_t *weight;
  void *low;
  const void *gradient;
  uint64_t gradient_is_float;
  void *first;
  void *second;
  int64_t count;
  int64_t start;  // the first element's place in the whole parameter, of which this may be a shard
  uint64_t weight_stream, first_stream, second_stream;
  uint16_t *first_scales, *second_scales;
  int64_t length;  // of a row whose moments have 8 bits and scales; 0 where they are bfloat16
};

struct Job {
  const Operand *operands;
  const float *numbers;
  const uint16_t *tile;
  int flags;
};

struct Piece {
  const Operand *operand;
  int64_t run;  // of TILE elements of the whole parameter, or of as many blocks of its rows
};

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline bool is_nan(uint32_t bits) { return (bits & 0x7FFFFFFFu) > 0x7F800000u; }

inline uint16_t nearest(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>(is_nan(bits) ? 0x7FC0u : rounded);
}

inline float wide(uint16_t value) { return float_of(static_cast<uint32_t>(value) << 16); }

inline float wide(float value) { return value; }

inline uint16_t at_random(float value, uint16_t noise) {  // rounded up or down
  const uint32_t bits = bits_of(value);
  return static_cast<uint16_t>(is_nan(bits) ? 0x7FC0u : (bits + noise) >> 16);
}

void widen(const uint16_t *source, float *out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = wide(source[i]);
}

void narrow_nearest(const float *source, uint16_t *out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = nearest(source[i]);
}

void narrow_stochastic(const float *source, uint16_t *out, int64_t count, const uint16_t *noise, uint16_t key) {
  for (int64_t i = 0; i < count; ++i) out[i] = at_random(source[i], noise[i] ^ key);
}

uint64_t mixed(uint64_t first, uint64_t second) {  // _mixed(first, second) of stochastic_rounding.py
  uint64_t state = 0;
  for (const uint64_t number : {first, second}) {
    state += number + 0x9E3779B97F4A7C15ull;
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9ull;
    state = (state ^ (state >> 27)) * 0x94D049BB133111EBull;
    state ^= state >> 31;
  }
  return state >> 1;
}

// The processor's own prefetching starts anew at every page of every stream, so it is told what comes.
template <typename T>
void prefetch(const T *start, int64_t count) {
  const char *address = reinterpret_cast<const char *>(start);
  for (int64_t line = 0; line < count * static_cast<int64_t>(sizeof(T)); line += 64) {
    __builtin_prefetch(address + line);
  }
}

// What comes AHEAD of these places, of the `left` elements from there on; null for a tensor that is not there.
template <typename... At>
void prefetch_ahead(int64_t left, const At *...at) {
  const int64_t count = left - AHEAD < BLOCK ? left - AHEAD : BLOCK;
  (..., (at != nullptr ? prefetch(at + AHEAD, count) : void()));
}

struct Noise {  // a run's place in the tile and its key
  const uint16_t *start;
  uint16_t key;
  explicit Noise(const uint16_t *ready) : start(ready), key(0) {}
  Noise(const uint16_t *tile, uint64_t stream, uint64_t run) {
    const uint64_t number = mixed(stream, run);
    start = tile + (number & (TILE - 1));
    key = static_cast<uint16_t>(number >> 40);
  }
};

template <int mode>
using Low = std::conditional_t<mode == SPLIT24, int8_t, uint16_t>;  // what is kept beside a bfloat16

template <int mode>
inline float joined(uint16_t weight, Low<mode> low) {
  if constexpr (mode == KAHAN) {
    const float high = wide(weight), rest = wide(low);
    const float limit = std::fabs(high) * 0x1p-8f;  // a stale rest of a weight from outside: see kahan.py
    const float above = rest < -limit ? -limit : rest;
    return high + (above > limit ? limit : above);
  } else if constexpr (mode == SPLIT || mode == SPLIT24) {
    constexpr int kept = mode == SPLIT ? 16 : 8;
    const uint32_t high = weight;
    const int32_t rest = static_cast<std::make_signed_t<Low<mode>>>(low);
    // A zero from outside with a stale negative low half would make a NaN: see split.py.
    const bool stale = (high & 0x7FFFu) == 0 && rest < 0;
    return float_of(((high << kept) + static_cast<uint32_t>(stale ? 0 : rest)) << (16 - kept));
  } else {
    return wide(weight);
  }
}

template <int mode>
inline void split_up(float value, uint16_t noise, uint16_t *weight, Low<mode> *low) {
  const uint32_t bits = bits_of(value);
  if constexpr (mode == KAHAN) {
    const uint16_t high = nearest(value);
    const uint32_t rest = bits_of(value - wide(high));
    const bool finite = (rest & 0x7F800000u) != 0x7F800000u;
    *weight = high;
    *low = static_cast<uint16_t>(finite ? (rest + noise) >> 16 : 0u);
  } else if constexpr (mode == SPLIT) {
    *weight = static_cast<uint16_t>(is_nan(bits) ? 0x7FC0u : (bits + 0x8000u) >> 16);
    *low = static_cast<uint16_t>(is_nan(bits) ? 0u : bits);
  } else if constexpr (mode == SPLIT24) {
    const uint32_t kept = (bits + (noise & 0xFFu)) >> 8;
    *weight = static_cast<uint16_t>(is_nan(bits) ? 0x7FC0u : (kept + 0x80u) >> 8);
    *low = static_cast<int8_t>(is_nan(bits) ? 0u : kept);
  } else if constexpr (mode == STOCHASTIC) {
    *weight = at_random(value, noise);
  } else {
    *weight = nearest(value);
  }
}

template <int mode>
constexpr bool keeps_low = mode == KAHAN || mode == SPLIT || mode == SPLIT24;

template <int mode>
constexpr bool needs_noise = mode == KAHAN || mode == SPLIT24 || mode == STOCHASTIC;

template <int mode>
void load_weight(const uint16_t *weight, const Low<mode> *low, float *out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = joined<mode>(weight[i], keeps_low<mode> ? low[i] : Low<mode>());
}

template <int mode>
void store_weight(const float *source, uint16_t *weight, Low<mode> *low, int64_t count, const Noise &noise,
                  int64_t offset) {
  for (int64_t i = 0; i < count; ++i) {
    const uint16_t drawn = needs_noise<mode> ? noise.start[offset + i] ^ noise.key : 0;
    split_up<mode>(source[i], drawn, weight + i, keeps_low<mode> ? low + i : nullptr);
  }
}

// Calls act with the value as a type: tests of it within a loop cost up to a quarter of a step.
template <typename Act>
void with_constant(bool value, const Act &act) {
  value ? act(std::true_type()) : act(std::false_type());
}

template <bool decays>
struct AdamW {
  uint32_t flip;
  float shrink, decay, keep1, beta2, keep2, correction, eps, minus_step_size;
  explicit AdamW(const Job &job)
      : flip(job.flags & MAXIMIZE ? 0x80000000u : 0u),
        shrink(job.flags & DECOUPLED ? job.numbers[0] : 1.0f),
        decay(job.numbers[1]),
        keep1(job.numbers[2]),
        beta2(job.numbers[3]),
        keep2(job.numbers[4]),
        correction(job.numbers[5]),
        eps(job.numbers[6]),
        minus_step_size(job.numbers[7]) {}

  inline void step(float *weight, float gradient, float *first, float *second) const {
    gradient = float_of(bits_of(gradient) ^ flip);
    *weight *= shrink;
    if constexpr (decays) gradient += decay * *weight;  // without decay an infinite weight stays infinite
    *first += keep1 * (gradient - *first);
    *second = *second * beta2 + keep2 * gradient * gradient;
    const float denominator = std::sqrt(*second) * correction + eps;
    *weight += minus_step_size * *first / denominator;
  }
};

// Calls act with the rule, and the gradient as what it is.
template <typename Act>
void with_adamw(const Job &job, const Operand &o, const Act &act) {
  with_constant(!(job.flags & DECOUPLED) && job.numbers[1] != 0.0f, [&](auto decays) {
    const AdamW<decays> rule(job);
    if (o.gradient_is_float) {
      act(rule, static_cast<const float *>(o.gradient));
    } else {
      act(rule, static_cast<const uint16_t *>(o.gradient));
    }
  });
}

void step_sgd(const Job &job, float *weight, float *gradient, float *first, int64_t count) {
  const float *n = job.numbers;
  const float decay = n[0], momentum = n[1], keep = n[2], minus_learning_rate = n[3];
  if (decay != 0.0f) {  // an infinite weight without decay stays infinite
    for (int64_t i = 0; i < count; ++i) gradient[i] += decay * weight[i];
  }
  if (first != nullptr) {
    if (job.flags & FIRST_STEP) {
      std::memcpy(first, gradient, count * sizeof(float));
    } else {
      for (int64_t i = 0; i < count; ++i) first[i] = first[i] * momentum + keep * gradient[i];
    }
    if (job.flags & NESTEROV) {
      for (int64_t i = 0; i < count; ++i) gradient[i] += momentum * first[i];
    } else {
      std::memcpy(gradient, first, count * sizeof(float));
    }
  }
  for (int64_t i = 0; i < count; ++i) weight[i] += minus_learning_rate * gradient[i];
}

void step_lion(const Job &job, float *weight, const float *gradient, float *first, int64_t count) {
  const float *n = job.numbers;
  const float shrink = n[0], beta1 = n[1], keep1 = n[2], beta2 = n[3], keep2 = n[4], minus_learning_rate = n[5];
  for (int64_t i = 0; i < count; ++i) {
    const float update = first[i] * beta1 + keep1 * gradient[i];
    // The sign of NaN is NaN, as in torch.
    const float sign = update > 0.0f ? 1.0f : (update < 0.0f ? -1.0f : update * 0.0f);
    weight[i] = weight[i] * shrink + minus_learning_rate * sign;
    first[i] = first[i] * beta2 + keep2 * gradient[i];
  }
}

template <int rule>
void step_rule(const Job &job, float *weight, float *gradient, float *first, int64_t count) {
  if (job.flags & MAXIMIZE) {
    for (int64_t i = 0; i < count; ++i) gradient[i] = -gradient[i];
  }
  if constexpr (rule == SGD) {
    step_sgd(job, weight, gradient, first, count);
  } else {
    step_lion(job, weight, gradient, first, count);
  }
}

void prefetch_gradient(const Operand &o, int64_t start) {
  if (o.gradient_is_float) {
    prefetch_ahead(o.count - start, static_cast<const float *>(o.gradient) + start);
  } else {
    prefetch_ahead(o.count - start, static_cast<const uint16_t *>(o.gradient) + start);
  }
}

void load_gradient(const Operand &o, int64_t start, float *out, int64_t count) {
  if (o.gradient_is_float) {
    std::memcpy(out, static_cast<const float *>(o.gradient) + start, count * sizeof(float));
  } else {
    widen(static_cast<const uint16_t *>(o.gradient) + start, out, count);
  }
}

struct Span {  // what a run of the whole parameter has in common with the `count` elements from `start` on
  int64_t begin, end;  // of these elements
  int64_t in_run;      // where in the run that begins
  Span(int64_t start, int64_t count, int64_t run) {
    const int64_t first = run * TILE, last = first + TILE;
    begin = first > start ? first - start : 0;
    end = last < start + count ? last - start : count;
    in_run = start + begin - first;
  }
};

// One loop from memory to memory.
template <int mode, bool first_at_random, typename Rule, typename Gradient>
void adamw_block(const Rule &rule, uint16_t *__restrict weight_at, Low<mode> *__restrict low_at,
                 const Gradient *__restrict gradient_at, uint16_t *__restrict first_at, uint16_t *__restrict second_at,
                 Noise weight_noise, Noise first_noise, Noise second_noise, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    float weight = joined<mode>(weight_at[i], keeps_low<mode> ? low_at[i] : Low<mode>());
    float first = wide(first_at[i]), second = wide(second_at[i]);
    rule.step(&weight, wide(gradient_at[i]), &first, &second);
    second_at[i] = at_random(second, second_noise.start[i] ^ second_noise.key);
    first_at[i] = first_at_random ? at_random(first, first_noise.start[i] ^ first_noise.key) : nearest(first);
    uint16_t high;
    Low<mode> low;
    split_up<mode>(weight, needs_noise<mode> ? weight_noise.start[i] ^ weight_noise.key : 0, &high, &low);
    weight_at[i] = high;
    if constexpr (keeps_low<mode>) low_at[i] = low;
  }
}

template <int mode>
void adamw_run(const Job &job, const Piece &piece) {
  const Operand &o = *piece.operand;
  const Span span(o.start, o.count, piece.run);
  Noise of_weight(job.tile, o.weight_stream, piece.run);
  Noise of_first(job.tile, o.first_stream, piece.run), of_second(job.tile, o.second_stream, piece.run);
  for (Noise *noise : {&of_weight, &of_first, &of_second}) noise->start += span.in_run;
  with_constant(job.flags & FIRST_IS_STOCHASTIC, [&](auto first_at_random) {
    with_adamw(job, o, [&](const auto &rule, const auto *gradient) {
      for (int64_t start = span.begin; start < span.end; start += BLOCK) {
        const int64_t count = start + BLOCK < span.end ? BLOCK : span.end - start;
        auto *low = keeps_low<mode> ? static_cast<Low<mode> *>(o.low) + start : nullptr;
        auto *first = static_cast<uint16_t *>(o.first) + start, *second = static_cast<uint16_t *>(o.second) + start;
        prefetch_ahead(o.count - start, o.weight + start, low, gradient + start, first, second);
        adamw_block<mode, first_at_random>(rule, o.weight + start, low, gradient + start, first, second, of_weight,
                                           of_first, of_second, count);
        for (Noise *noise : {&of_weight, &of_first, &of_second}) noise->start += count;
      }
    });
  });
}

template <int rule, int mode>
void step_run(const Job &job, const Piece &piece) {
  alignas(64) float weight[BLOCK], gradient[BLOCK], first[BLOCK];
  const Operand &o = *piece.operand;
  const Span span(o.start, o.count, piece.run);
  const Noise weight_noise(job.tile, o.weight_stream, piece.run);
  const Noise first_noise(job.tile, o.first_stream, piece.run);
  for (int64_t start = span.begin; start < span.end; start += BLOCK) {
    const int64_t count = start + BLOCK < span.end ? BLOCK : span.end - start;
    const int64_t offset = span.in_run + start - span.begin;
    Low<mode> *low = o.low == nullptr ? nullptr : static_cast<Low<mode> *>(o.low) + start;
    uint16_t *first_at = o.first == nullptr ? nullptr : static_cast<uint16_t *>(o.first) + start;
    prefetch_ahead(o.count - start, o.weight + start, low, first_at);
    prefetch_gradient(o, start);
    load_weight<mode>(o.weight + start, low, weight, count);
    load_gradient(o, start, gradient, count);
    if (first_at != nullptr) widen(first_at, first, count);
    step_rule<rule>(job, weight, gradient, first_at == nullptr ? nullptr : first, count);
    if (first_at != nullptr) {
      if (job.flags & FIRST_IS_STOCHASTIC) {
        narrow_stochastic(first, first_at, count, first_noise.start + offset, first_noise.key);
      } else {
        narrow_nearest(first, first_at, count);
      }
    }
    store_weight<mode>(weight, o.weight + start, low, count, weight_noise, offset);
  }
}

// Moments in 8 bits: quantised.py says what the codes are and why.

constexpr int64_t BLOCKS_A_PIECE = TILE / BLOCK;
constexpr float LEVELS_FIRST = 127.0f, LEVELS_SECOND = 255.0f, STAYS = 0.875f;
constexpr uint32_t SMALLEST_SCALE = 0x00800000u, LARGEST_SCALE = 0x7F7F0000u, INFINITE = 0x7F800000u;
constexpr uint16_t NO_SCALE = 0x7FC0u;  // of a block with infinity or NaN: its moments are NaN

class ElementNoise {  // of one state of a parameter, for blocks anywhere in it
 public:
  ElementNoise(const uint16_t *tile, uint64_t stream) : tile_(tile), stream_(stream), noise_(tile, stream, 0) {}

  // Of the `count` elements from `place` on; valid until the next call.
  Noise of(int64_t place, int64_t count) {
    const int64_t in_run = place % TILE;
    run_to(place / TILE);
    if (in_run + count <= TILE) {
      Noise noise = noise_;
      noise.start += in_run;
      return noise;
    }
    for (int64_t i = 0; i < count; ++i) {
      if (in_run + i == TILE) run_to(run_ + 1);
      both_[i] = noise_.start[(in_run + i) % TILE] ^ noise_.key;
    }
    return Noise(both_);
  }

 private:
  const uint16_t *tile_;
  uint64_t stream_;
  int64_t run_ = 0;
  Noise noise_;
  uint16_t both_[BLOCK];  // of a block that lies in two runs

  void run_to(int64_t run) {
    if (run != run_) noise_ = Noise(tile_, stream_, run_ = run);
  }
};

// The bits of the larger magnitude; as integers, so that NaN is the largest.
inline uint32_t larger(uint32_t most, float value) {
  const uint32_t bits = bits_of(value) & 0x7FFFFFFFu;
  return bits > most ? bits : most;
}

uint32_t largest_of(const float *values, int64_t count) {
  uint32_t most = SMALLEST_SCALE;
  for (int64_t i = 0; i < count; ++i) most = larger(most, values[i]);
  return most;
}

// The scale of a block's moments, as bfloat16: the one before if the largest value is near it.
uint16_t scale_of(uint32_t most, uint16_t scale) {
  if (most >= INFINITE) return NO_SCALE;
  const float largest = float_of(most), before = wide(scale);
  if (largest <= before && largest > before * STAYS) return scale;
  const uint32_t up = (most + 0xFFFFu) & 0xFFFF0000u;
  return static_cast<uint16_t>((up < LARGEST_SCALE ? up : LARGEST_SCALE) >> 16);
}

inline float factor_of_first(uint16_t scale) { return wide(scale) * static_cast<float>(1.0 / (127.0 * 127.0)); }

inline float first_of(int8_t code, float factor) {
  const float root = code;
  return root * std::fabs(root) * factor;
}

inline float second_of(uint8_t code, float scale) {
  const float root = code * static_cast<float>(1.0 / 255.0);
  const float second = root * root, fourth = second * second;
  return fourth * fourth * scale;
}

inline float below_of(uint16_t noise) { return (noise + 0.5f) * 0x1p-16f; }

inline void round_share(float share, uint16_t noise, int8_t *code) {  // of a first moment
  const float square = std::fabs(share) * (LEVELS_FIRST * LEVELS_FIRST);
  const int32_t root = static_cast<int32_t>(std::sqrt(square));
  const float low = static_cast<float>(root < 126 ? root : 126);
  const bool up = below_of(noise) * (low + low + 1.0f) < square - low * low;
  const int32_t rounded = static_cast<int32_t>(low) + (up ? 1 : 0);
  *code = static_cast<int8_t>(share < 0.0f ? -rounded : rounded);
}

inline void round_share(float share, uint16_t noise, uint8_t *code) {  // of a second moment
  const float root = std::sqrt(std::sqrt(std::sqrt(share))) * LEVELS_SECOND;
  const int32_t rounded = static_cast<int32_t>(root + below_of(noise));
  const int32_t least = share > 0.0f ? 1 : 0, most = rounded < 255 ? rounded : 255;
  *code = static_cast<uint8_t>(most > least ? most : least);
}

template <typename Code>
struct Codes {  // of a block's moments, and what rounds them
  Code *__restrict codes;
  uint16_t scale;
  Noise noise;
};

template <typename Code>
void encode(const float *__restrict values, const Codes<Code> &to, int64_t count) {
  if (to.scale == NO_SCALE) return static_cast<void>(std::memset(to.codes, 0, count));
  const float inverse = 1.0f / wide(to.scale);
  Code *__restrict codes = to.codes;
  const uint16_t *__restrict drawn = to.noise.start;
  const uint16_t key = to.noise.key;
  for (int64_t i = 0; i < count; ++i) round_share(values[i] * inverse, drawn[i] ^ key, codes + i);
}

// Both moments in one loop: the roots of one take as long as all else of the other.
void encode_both(const float *__restrict first, const float *__restrict second, const Codes<int8_t> &to_first,
                 const Codes<uint8_t> &to_second, int64_t count) {
  if (to_first.scale == NO_SCALE || to_second.scale == NO_SCALE) {
    encode(first, to_first, count);
    return encode(second, to_second, count);
  }
  const float first_inverse = 1.0f / wide(to_first.scale), second_inverse = 1.0f / wide(to_second.scale);
  int8_t *__restrict first_codes = to_first.codes;
  uint8_t *__restrict second_codes = to_second.codes;
  const uint16_t *__restrict first_drawn = to_first.noise.start, *__restrict second_drawn = to_second.noise.start;
  const uint16_t first_key = to_first.noise.key, second_key = to_second.noise.key;
  for (int64_t i = 0; i < count; ++i) {
    round_share(first[i] * first_inverse, first_drawn[i] ^ first_key, first_codes + i);
    round_share(second[i] * second_inverse, second_drawn[i] ^ second_key, second_codes + i);
  }
}

// Calls act with each block of a run, the place of its first element, and how many it has.
template <typename Act>
void each_block(const Operand &o, int64_t run, const Act &act) {
  const int64_t in_row = (o.length + BLOCK - 1) / BLOCK, all = o.count / o.length * in_row;
  const int64_t begin = run * BLOCKS_A_PIECE;
  const int64_t end = begin + BLOCKS_A_PIECE < all ? begin + BLOCKS_A_PIECE : all;
  for (int64_t block = begin; block < end; ++block) {
    const int64_t row = block / in_row, in_block = (block - row * in_row) * BLOCK;
    const int64_t rest = o.length - in_block;
    act(block, row * o.length + in_block, rest < BLOCK ? rest : BLOCK);
  }
}

struct Largest {  // of a block's moments, as `larger` says
  uint32_t first, second;
};

struct Coded {  // the moments of a block
  int8_t *first_codes;
  uint8_t *second_codes;
  float first_factor, second_factor;
};

// As adamw_block, from codes to float32 moments, which are rounded when the largest is known.
template <int mode, typename Rule, typename Gradient>
Largest adamw_coded(const Rule &rule, uint16_t *__restrict weight_at, Low<mode> *__restrict low_at,
                 const Gradient *__restrict gradient_at, const Coded &moments, float *__restrict first_at,
                 float *__restrict second_at, Noise noise, int64_t count) {
  const int8_t *__restrict first_codes = moments.first_codes;
  const uint8_t *__restrict second_codes = moments.second_codes;
  const float first_factor = moments.first_factor, second_factor = moments.second_factor;
  uint32_t first_most = SMALLEST_SCALE, second_most = SMALLEST_SCALE;
  for (int64_t i = 0; i < count; ++i) {
    float weight = joined<mode>(weight_at[i], keeps_low<mode> ? low_at[i] : Low<mode>());
    float first = first_of(first_codes[i], first_factor);
    float second = second_of(second_codes[i], second_factor);
    rule.step(&weight, wide(gradient_at[i]), &first, &second);
    first_at[i] = first, second_at[i] = second;
    first_most = larger(first_most, first), second_most = larger(second_most, second);
    uint16_t high;
    Low<mode> low;
    split_up<mode>(weight, needs_noise<mode> ? noise.start[i] ^ noise.key : 0, &high, &low);
    weight_at[i] = high;
    if constexpr (keeps_low<mode>) low_at[i] = low;
  }
  return {first_most, second_most};
}

template <int mode>
void adamw_blocks(const Job &job, const Piece &piece) {
  alignas(64) float first[BLOCK], second[BLOCK];
  const Operand &o = *piece.operand;
  ElementNoise of_weight(job.tile, o.weight_stream);
  ElementNoise of_first(job.tile, o.first_stream), of_second(job.tile, o.second_stream);
  with_adamw(job, o, [&](const auto &rule, const auto *gradient) {
    each_block(o, piece.run, [&](int64_t block, int64_t start, int64_t count) {
      auto *low = keeps_low<mode> ? static_cast<Low<mode> *>(o.low) + start : nullptr;
      uint16_t *first_scale = o.first_scales + block, *second_scale = o.second_scales + block;
      const Coded moments{static_cast<int8_t *>(o.first) + start, static_cast<uint8_t *>(o.second) + start,
                          factor_of_first(*first_scale), wide(*second_scale)};
      prefetch_ahead(o.count - start, o.weight + start, low, gradient + start, moments.first_codes,
                     moments.second_codes);
      const int64_t place = o.start + start;
      const Largest most = adamw_coded<mode>(rule, o.weight + start, low, gradient + start, moments, first,
                                             second, of_weight.of(place, count), count);
      *first_scale = scale_of(most.first, *first_scale);
      *second_scale = scale_of(most.second, *second_scale);
      encode_both(first, second, {moments.first_codes, *first_scale, of_first.of(place, count)},
                  {moments.second_codes, *second_scale, of_second.of(place, count)}, count);
    });
  });
}

template <int rule, int mode>
void step_blocks(const Job &job, const Piece &piece) {
  alignas(64) float weight[BLOCK], gradient[BLOCK], first[BLOCK];
  const Operand &o = *piece.operand;
  ElementNoise of_weight(job.tile, o.weight_stream), of_first(job.tile, o.first_stream);
  each_block(o, piece.run, [&](int64_t block, int64_t start, int64_t count) {
    Low<mode> *low = keeps_low<mode> ? static_cast<Low<mode> *>(o.low) + start : nullptr;
    int8_t *codes = static_cast<int8_t *>(o.first) + start;
    uint16_t *scale = o.first_scales + block;
    prefetch_ahead(o.count - start, o.weight + start, low, codes);
    prefetch_gradient(o, start);
    load_weight<mode>(o.weight + start, low, weight, count);
    load_gradient(o, start, gradient, count);
    const float factor = factor_of_first(*scale);
    for (int64_t i = 0; i < count; ++i) first[i] = first_of(codes[i], factor);
    step_rule<rule>(job, weight, gradient, first, count);
    *scale = scale_of(largest_of(first, count), *scale);
    encode(first, Codes<int8_t>{codes, *scale, of_first.of(o.start + start, count)}, count);
    store_weight<mode>(weight, o.weight + start, low, count, of_weight.of(o.start + start, count), 0);
  });
}

template <int rule, int mode>
void step_piece(const Job &job, const Piece &piece) {
  const bool has_codes = piece.operand->length > 0;
  if constexpr (rule == ADAMW) {
    has_codes ? adamw_blocks<mode>(job, piece) : adamw_run<mode>(job, piece);
  } else {
    has_codes ? step_blocks<rule, mode>(job, piece) : step_run<rule, mode>(job, piece);
  }
}

using StepPiece = void (*)(const Job &, const Piece &);

template <int rule>
StepPiece step_of_mode(int mode) {
  switch (mode) {
    case KAHAN: return step_piece<rule, KAHAN>;
    case SPLIT: return step_piece<rule, SPLIT>;
    case STOCHASTIC: return step_piece<rule, STOCHASTIC>;
    case SPLIT24: return step_piece<rule, SPLIT24>;
    default: return step_piece<rule, NONE>;
  }
}

StepPiece step_of(int rule, int mode) {
  switch (rule) {
    case SGD: return step_of_mode<SGD>(mode);
    case LION: return step_of_mode<LION>(mode);
    default: return step_of_mode<ADAMW>(mode);
  }
}

template <int mode>
void widen_all(const uint16_t *high, const void *low, float *out, int64_t start, int64_t end) {
  const auto *rest = static_cast<const Low<mode> *>(low);
  load_weight<mode>(high + start, rest == nullptr ? nullptr : rest + start, out + start, end - start);
}

template <int mode>
void narrow_all(const float *source, uint16_t *high, void *low, const Noise &noise, const Span &span) {
  auto *rest = low == nullptr ? nullptr : static_cast<Low<mode> *>(low) + span.begin;
  store_weight<mode>(source + span.begin, high + span.begin, rest, span.end - span.begin, noise, span.in_run);
}

// GOMP_parallel of the OpenMP that runs torch's operators: its threads wait actively for their next task for some
// milliseconds, and other threads would get a part of their cores only.
using Parallel = void (*)(void (*)(void *), void *, unsigned, unsigned);
std::atomic<Parallel> parallel{nullptr};

template <typename Share>
struct Team {
  const Share &share;
  int64_t workers;
  std::atomic<int64_t> next{0};

  static void run(void *team) {  // by every thread of it, of which there may be fewer than shares
    auto &self = *static_cast<Team *>(team);
    for (int64_t worker; (worker = self.next.fetch_add(1)) < self.workers;) self.share(worker);
  }
};

// Calls work(index) for every index below count, in contiguous shares, one a thread.
template <typename Work>
void in_threads(int64_t count, int threads, const Work &work) {
  const int64_t workers = threads < count ? threads : count;
  const auto share = [&](int64_t worker) {
    for (int64_t i = count * worker / workers; i < count * (worker + 1) / workers; ++i) work(i);
  };
  Team<decltype(share)> team{share, workers};
  const Parallel of_torch = parallel.load();
  if (workers > 1 && of_torch != nullptr) return of_torch(team.run, &team, static_cast<unsigned>(workers), 0);
  std::vector<std::thread> others;
  try {
    for (int64_t worker = 1; worker < workers; ++worker) others.emplace_back(team.run, &team);
  } catch (const std::system_error &) {  // no more threads to be had: these do the rest
  }
  team.run(&team);
  for (std::thread &other : others) other.join();
}

}  // namespace

// Steps run on this OpenMP's threads from now on; null: on threads of their own.
extern "C" void memkit_run_on(Parallel of_torch) { parallel = of_torch; }

// Joins weights and low halves (none, kahan, split or split24) into float32.
extern "C" void memkit_widen(int mode, const uint16_t *high, const void *low, float *out, int64_t count,
                             int threads) {
  in_threads((count + TILE - 1) / TILE, threads, [&](int64_t run) {
    const int64_t start = run * TILE, end = start + TILE < count ? start + TILE : count;
    switch (mode) {
      case KAHAN: return widen_all<KAHAN>(high, low, out, start, end);
      case SPLIT: return widen_all<SPLIT>(high, low, out, start, end);
      case SPLIT24: return widen_all<SPLIT24>(high, low, out, start, end);
      default: return widen_all<NONE>(high, low, out, start, end);
    }
  });
}

// Splits float32 into weights and low halves, or rounds it; `source` begins at element `start` of the whole.
extern "C" void memkit_narrow(int mode, const float *source, uint16_t *high, void *low, int64_t count,
                              const uint16_t *tile, uint64_t stream, int64_t start, int threads) {
  if (count == 0) return;
  const int64_t first = start / TILE, last = (start + count - 1) / TILE;
  in_threads(last - first + 1, threads, [&](int64_t index) {
    const Span span(start, count, first + index);
    const Noise noise(tile, stream, first + index);
    switch (mode) {
      case KAHAN: return narrow_all<KAHAN>(source, high, low, noise, span);
      case SPLIT: return narrow_all<SPLIT>(source, high, low, noise, span);
      case STOCHASTIC: return narrow_all<STOCHASTIC>(source, high, low, noise, span);
      case SPLIT24: return narrow_all<SPLIT24>(source, high, low, noise, span);
      default: return narrow_all<NONE>(source, high, low, noise, span);
    }
  });
}

extern "C" void memkit_step(int rule, int mode, int flags, const float *numbers, const void *operands,
                            int64_t operand_count, const uint16_t *tile, int threads) {
  const Job job{static_cast<const Operand *>(operands), numbers, tile, flags};
  const StepPiece step = step_of(rule, mode);
  std::vector<Piece> pieces;
  for (int64_t index = 0; index < operand_count; ++index) {
    const Operand &operand = job.operands[index];
    if (operand.count == 0) continue;
    if (operand.length > 0) {
      const int64_t blocks = operand.count / operand.length * ((operand.length + BLOCK - 1) / BLOCK);
      for (int64_t run = 0; run * BLOCKS_A_PIECE < blocks; ++run) pieces.push_back({&operand, run});
      continue;
    }
    const int64_t last = (operand.start + operand.count - 1) / TILE;
    for (int64_t run = operand.start / TILE; run <= last; ++run) pieces.push_back({&operand, run});
  }
  in_threads(static_cast<int64_t>(pieces.size()), threads, [&](int64_t index) { step(job, pieces[index]); });
}

// Adds one to each count, and writes to `after` what they are then.
extern "C" void memkit_advance(float *const *counts, int64_t count, float *after) {
  for (int64_t index = 0; index < count; ++index) *counts[index] += 1.0f;
  for (int64_t index = 0; index < count; ++index) after[index] = *counts[index];
}
