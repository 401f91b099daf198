// The products of a warpgroup (wgmma.mma_async): D = A B + D for 64 rows, 16 or 32 columns of A, and any N.
//
// A product reads B, and mostly A, from shared memory, through descriptors: SmemOperand makes them. A may come from
// registers instead. The sums D are registers.
//
// One instruction names all of its registers, so that each N needs a text of its own. The preprocessor writes them all
// (below), as class templates that cost nothing until a kernel uses them.
#pragma once

#include <cutlass/numeric_types.h>

#include <cstdint>
#include <cute/arch/util.hpp>

#include "common/fragment.hpp"

namespace hattn::sm90 {

// Orders this warpgroup's accesses to registers before the products that follow.
CUTE_DEVICE void warpgroup_arrive() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Makes a group of the products since the last one.
CUTE_DEVICE void warpgroup_commit_batch() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits for all groups but the last kLater.
template <int kLater>
CUTE_DEVICE void warpgroup_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLater) : "memory");
}

// Keeps the compiler from moving accesses to these registers across this point, or the registers elsewhere.
template <class Element, int kCount>
CUTE_DEVICE void warpgroup_fence_operand(Fragment<Element, kCount>& fragment) {
  if constexpr (cute::is_same_v<Element, float>) {
    CUTE_UNROLL
    for (int i = 0; i < kCount; ++i) {
      asm volatile("" : "+f"(fragment(i))::"memory");
    }
  } else {
    auto& words = recast<std::uint32_t>(fragment);
    CUTE_UNROLL
    for (int i = 0; i < words.size(); ++i) {
      asm volatile("" : "+r"(words(i))::"memory");
    }
  }
}

// -- operands in shared memory

// Which of an operand's dimensions is contiguous: K, along which a product sums, or the other one.
enum class Major { K, MN };

// How rows are swizzled, as descriptors have it.
constexpr std::uint32_t kNoSwizzle = 0;
constexpr std::uint32_t kSwizzle128 = 1;
constexpr std::uint32_t kSwizzle64 = 2;

// A layout says what a descriptor holds, in units of 16 bytes, and how far apart the pieces are:
//   kMajor, kSwizzle
//   kLeading  the descriptor's leading dimension offset
//   kStride   the descriptor's stride dimension offset: between groups of eight rows
//   kSteps    k-steps of the operand, each 32 bytes of K
//   step(k)   where k-step k begins
//   kStage    from one buffer to the next

// A tile [row][k], in slabs of rows of kRowBytes bytes, which are swizzled over all their bytes.
template <class Element, int kRows, int kColumns, int kRowBytes = 128>
struct KMajorTile {
  static_assert(kRowBytes == 128 || kRowBytes == 64);
  static constexpr Major kMajor = Major::K;
  static constexpr std::uint32_t kSwizzle = kRowBytes == 128 ? kSwizzle128 : kSwizzle64;
  static constexpr std::uint32_t kLeading = 1;  // not read
  static constexpr std::uint32_t kStride = 8 * kRowBytes / 16;
  static constexpr int kSteps = kColumns * sizeof(Element) / 32;
  static constexpr std::uint32_t kStage = kRows * kColumns * sizeof(Element) / 16;
  CUTE_DEVICE static constexpr std::uint32_t step(int k) {
    constexpr int kStepsSlab = kRowBytes / 32;
    return k % kStepsSlab * 2 + k / kStepsSlab * (kRows * kRowBytes / 16);
  }
};

// A tile [k][column] of 16-bit elements, in slabs of rows of kRowBytes bytes. A product reads kRead of the columns,
// which begin with a slab.
template <class Element, int kRows, int kColumns, int kRead = kColumns, int kRowBytes = 128>
struct MnMajorTile {
  static_assert(sizeof(Element) == 2, "the products of 8-bit elements read K-major operands alone");
  static_assert(kRowBytes == 128 || kRowBytes == 64);
  static_assert(kRead < kRowBytes / 2 || kRead % (kRowBytes / 2) == 0, "a product reads whole slabs, or of one alone");
  static constexpr Major kMajor = Major::MN;
  static constexpr std::uint32_t kSwizzle = kRowBytes == 128 ? kSwizzle128 : kSwizzle64;
  static constexpr std::uint32_t kLeading = kRead > kRowBytes / 2 ? kRows* kRowBytes / 16 : 0;  // between slabs
  static constexpr std::uint32_t kStride = 8 * kRowBytes / 16;
  static constexpr int kSteps = kRows / 16;
  static constexpr std::uint32_t kStage = kRows * kColumns * sizeof(Element) / 16;
  CUTE_DEVICE static constexpr std::uint32_t step(int k) { return k * (16 * kRowBytes / 16); }
};

// One k-step of 16-bit elements, as blocks of 8 rows by 8 elements of K, 128 bytes each: kAlongK units from one of the
// two blocks along K to the other, kAlongRows to the next eight rows. Distances of 0 read a block again.
template <std::uint32_t kAlongK, std::uint32_t kAlongRows, std::uint32_t kBuffer>
struct UnswizzledBlocks {
  static constexpr Major kMajor = Major::K;
  static constexpr std::uint32_t kSwizzle = kNoSwizzle;
  static constexpr std::uint32_t kLeading = kAlongK;
  static constexpr std::uint32_t kStride = kAlongRows;
  static constexpr int kSteps = 1;
  static constexpr std::uint32_t kStage = kBuffer;
  CUTE_DEVICE static constexpr std::uint32_t step(int) { return 0; }
};

// A descriptor of an operand, the same for every thread.
template <class LayoutType>
struct SmemOperand {
  using Layout = LayoutType;
  // The lower half has the address. It alone is counted with: as 64-bit numbers, descriptors would take twice the
  // instructions.
  union {
    std::uint64_t word;
    std::uint32_t halves[2];
  };

  CUTE_DEVICE static SmemOperand of(void const* tile) {
    constexpr std::uint64_t kFixed = static_cast<std::uint64_t>(Layout::kLeading) << 16 |
                                     static_cast<std::uint64_t>(Layout::kStride) << 32 |
                                     static_cast<std::uint64_t>(Layout::kSwizzle) << 62;
    SmemOperand operand;
    operand.word = (cute::cast_smem_ptr_to_uint(tile) >> 4 & 0x3fffU) | kFixed;
    return operand;
  }
  // The operand `units` of 16 bytes further.
  CUTE_DEVICE SmemOperand further(std::uint32_t units) const {
    SmemOperand operand;
    operand.halves[0] = halves[0] + units;
    operand.halves[1] = halves[1];
    return operand;
  }
  // The same operand in another buffer.
  CUTE_DEVICE SmemOperand stage(std::uint32_t index) const { return further(index * Layout::kStage); }
  // Of one k-step.
  CUTE_DEVICE std::uint64_t step(int k) const { return further(Layout::step(k)).word; }
};

// -- instructions

// The types of an instruction, after its N.
template <class Element, class Sum>
struct WgmmaTypes;
template <>
struct WgmmaTypes<cutlass::half_t, float> {
  static constexpr char kText[] = "k16.f32.f16.f16";
};
template <>
struct WgmmaTypes<cutlass::bfloat16_t, float> {
  static constexpr char kText[] = "k16.f32.bf16.bf16";
};
template <>
struct WgmmaTypes<cutlass::float_e4m3_t, float> {
  static constexpr char kText[] = "k32.f32.e4m3.e4m3";
};
template <>
struct WgmmaTypes<cutlass::float_e4m3_t, cutlass::half_t> {
  static constexpr char kText[] = "k32.f16.e4m3.e4m3";
};

// Which operands in shared memory are transposed, as the last arguments of an instruction. Instructions of 8-bit types
// have no such arguments.
template <bool kHas, Major... kMajors>
struct WgmmaMajors {
  static constexpr char kText[] = "";
};
template <Major kB>
struct WgmmaMajors<true, kB> {
  static constexpr char kText[] = {',', ' ', kB == Major::MN ? '1' : '0', 0};
};
template <Major kA, Major kB>
struct WgmmaMajors<true, kA, kB> {
  static constexpr char kText[] = {',', ' ', kA == Major::MN ? '1' : '0', ',', ' ', kB == Major::MN ? '1' : '0', 0};
};

// The instructions of one N, with sums in registers of one type: f32, or pairs of f16.
template <class Register, int kN>
struct WgmmaInstruction;

// One k-step: D = A B + D, or A B alone. kN is 8 to 256 in steps of 8.
template <class Element, class Sum, int kN>
struct Wgmma {
  using Sums = Fragment<Sum, kN / 2>;
  using Register = cute::conditional_t<cute::is_same_v<Sum, float>, float, std::uint32_t>;
  using Instruction = WgmmaInstruction<Register, kN>;
  using Types = WgmmaTypes<Element, Sum>;
  static constexpr bool kHasMajors = sizeof(Element) == 2;

  // A and B from shared memory.
  template <bool kAccumulate, class A, class B>
  CUTE_DEVICE static void issue(SmemOperand<A> const& a, SmemOperand<B> const& b, int k, Sums& sums) {
    Instruction::template issue<kAccumulate, Types, WgmmaMajors<kHasMajors, A::kMajor, B::kMajor>>(
        recast<Register>(sums).elements, a.step(k), b.step(k));
  }
  // A from registers, four a k-step.
  template <bool kAccumulate, int kWords, class B>
  CUTE_DEVICE static void issue(Fragment<std::uint32_t, kWords> const& a, SmemOperand<B> const& b, int k, Sums& sums) {
    static_assert(kWords == 4 * B::kSteps);
    Instruction::template issue<kAccumulate, Types, WgmmaMajors<kHasMajors, B::kMajor>>(
        recast<Register>(sums).elements, a(4 * k), a(4 * k + 1), a(4 * k + 2), a(4 * k + 3), b.step(k));
  }
};

// Below, %0 and what follows are the sums d[0] and what follows, in tens and a rest: HATTN_NAMES_* writes them into an
// instruction, HATTN_SUMS_* lists them as operands with constraint `c`. `t` is the tens' digits, empty for none.
#define HATTN_NAMES_2(t) "%" #t "0, %" #t "1"
#define HATTN_NAMES_4(t) HATTN_NAMES_2(t) ", %" #t "2, %" #t "3"
#define HATTN_NAMES_6(t) HATTN_NAMES_4(t) ", %" #t "4, %" #t "5"
#define HATTN_NAMES_8(t) HATTN_NAMES_6(t) ", %" #t "6, %" #t "7"
#define HATTN_NAMES_10(t) HATTN_NAMES_8(t) ", %" #t "8, %" #t "9"
#define HATTN_NAMES_TENS_0
#define HATTN_NAMES_TENS_1 HATTN_NAMES_TENS_0 HATTN_NAMES_10() ", "
#define HATTN_NAMES_TENS_2 HATTN_NAMES_TENS_1 HATTN_NAMES_10(1) ", "
#define HATTN_NAMES_TENS_3 HATTN_NAMES_TENS_2 HATTN_NAMES_10(2) ", "
#define HATTN_NAMES_TENS_4 HATTN_NAMES_TENS_3 HATTN_NAMES_10(3) ", "
#define HATTN_NAMES_TENS_5 HATTN_NAMES_TENS_4 HATTN_NAMES_10(4) ", "
#define HATTN_NAMES_TENS_6 HATTN_NAMES_TENS_5 HATTN_NAMES_10(5) ", "
#define HATTN_NAMES_TENS_7 HATTN_NAMES_TENS_6 HATTN_NAMES_10(6) ", "
#define HATTN_NAMES_TENS_8 HATTN_NAMES_TENS_7 HATTN_NAMES_10(7) ", "
#define HATTN_NAMES_TENS_9 HATTN_NAMES_TENS_8 HATTN_NAMES_10(8) ", "
#define HATTN_NAMES_TENS_10 HATTN_NAMES_TENS_9 HATTN_NAMES_10(9) ", "
#define HATTN_NAMES_TENS_11 HATTN_NAMES_TENS_10 HATTN_NAMES_10(10) ", "
#define HATTN_NAMES_TENS_12 HATTN_NAMES_TENS_11 HATTN_NAMES_10(11) ", "
#define HATTN_SUMS_2(c, t) c(d[t##0]), c(d[t##1])
#define HATTN_SUMS_4(c, t) HATTN_SUMS_2(c, t), c(d[t##2]), c(d[t##3])
#define HATTN_SUMS_6(c, t) HATTN_SUMS_4(c, t), c(d[t##4]), c(d[t##5])
#define HATTN_SUMS_8(c, t) HATTN_SUMS_6(c, t), c(d[t##6]), c(d[t##7])
#define HATTN_SUMS_10(c, t) HATTN_SUMS_8(c, t), c(d[t##8]), c(d[t##9])
#define HATTN_SUMS_TENS_0(c)
#define HATTN_SUMS_TENS_1(c) HATTN_SUMS_TENS_0(c) HATTN_SUMS_10(c, ),
#define HATTN_SUMS_TENS_2(c) HATTN_SUMS_TENS_1(c) HATTN_SUMS_10(c, 1),
#define HATTN_SUMS_TENS_3(c) HATTN_SUMS_TENS_2(c) HATTN_SUMS_10(c, 2),
#define HATTN_SUMS_TENS_4(c) HATTN_SUMS_TENS_3(c) HATTN_SUMS_10(c, 3),
#define HATTN_SUMS_TENS_5(c) HATTN_SUMS_TENS_4(c) HATTN_SUMS_10(c, 4),
#define HATTN_SUMS_TENS_6(c) HATTN_SUMS_TENS_5(c) HATTN_SUMS_10(c, 5),
#define HATTN_SUMS_TENS_7(c) HATTN_SUMS_TENS_6(c) HATTN_SUMS_10(c, 6),
#define HATTN_SUMS_TENS_8(c) HATTN_SUMS_TENS_7(c) HATTN_SUMS_10(c, 7),
#define HATTN_SUMS_TENS_9(c) HATTN_SUMS_TENS_8(c) HATTN_SUMS_10(c, 8),
#define HATTN_SUMS_TENS_10(c) HATTN_SUMS_TENS_9(c) HATTN_SUMS_10(c, 9),
#define HATTN_SUMS_TENS_11(c) HATTN_SUMS_TENS_10(c) HATTN_SUMS_10(c, 10),
#define HATTN_SUMS_TENS_12(c) HATTN_SUMS_TENS_11(c) HATTN_SUMS_10(c, 11),

// `i0` and what follows are the numbers of the operands after the sums. Whether D is added to is a constant: as a value
// in a register it would change the order of what the compiler emits, and ptxas serialises one FP8 row then.
#define HATTN_WGMMA(Register, count, c, n, tens, t, rest, i0, i1, i2, i3, i4, i5, i6, i7)                        \
  template <>                                                                                                    \
  struct WgmmaInstruction<Register, n> {                                                                         \
    template <int kAccumulate, class Types, class Majors>                                                        \
    CUTE_DEVICE static void issue(Register (&d)[count], std::uint64_t a, std::uint64_t b) {                      \
      asm volatile("{.reg .pred p; setp.ne.b32 p, %" #i2 ", 0; wgmma.mma_async.sync.aligned.m64n" #n "%" #i3     \
                   " {" HATTN_NAMES_TENS_##tens HATTN_NAMES_##rest(t) "}, %" #i0 ", %" #i1 ", p, 1, 1%" #i4 ";}" \
                   : HATTN_SUMS_TENS_##tens(c) HATTN_SUMS_##rest(c, t)                                           \
                   : "l"(a), "l"(b), "n"(kAccumulate), "C"(Types::kText), "C"(Majors::kText));                   \
    }                                                                                                            \
    template <int kAccumulate, class Types, class Majors>                                                        \
    CUTE_DEVICE static void issue(Register (&d)[count], std::uint32_t a0, std::uint32_t a1, std::uint32_t a2,    \
                                  std::uint32_t a3, std::uint64_t b) {                                           \
      asm volatile("{.reg .pred p; setp.ne.b32 p, %" #i5 ", 0; wgmma.mma_async.sync.aligned.m64n" #n "%" #i6     \
                   " {" HATTN_NAMES_TENS_##tens HATTN_NAMES_##rest(t) "}, {%" #i0 ", %" #i1 ", %" #i2 ", %" #i3  \
                                                                      "}, %" #i4 ", p, 1, 1%" #i7 ";}"           \
                   : HATTN_SUMS_TENS_##tens(c) HATTN_SUMS_##rest(c, t)                                           \
                   : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "n"(kAccumulate), "C"(Types::kText),            \
                     "C"(Majors::kText));                                                                        \
    }                                                                                                            \
  };
#define HATTN_WGMMA_F32(n, ...) HATTN_WGMMA(float, n / 2, "+f", n, __VA_ARGS__)
#define HATTN_WGMMA_F16(n, ...) HATTN_WGMMA(std::uint32_t, n / 4, "+r", n, __VA_ARGS__)

// clang-format off
//              N  tens and rest of the sums, operands after them
HATTN_WGMMA_F32(8, 0, , 4, 4, 5, 6, 7, 8, 9, 10, 11)
HATTN_WGMMA_F32(16, 0, , 8, 8, 9, 10, 11, 12, 13, 14, 15)
HATTN_WGMMA_F32(24, 1, 1, 2, 12, 13, 14, 15, 16, 17, 18, 19)
HATTN_WGMMA_F32(32, 1, 1, 6, 16, 17, 18, 19, 20, 21, 22, 23)
HATTN_WGMMA_F32(40, 1, 1, 10, 20, 21, 22, 23, 24, 25, 26, 27)
HATTN_WGMMA_F32(48, 2, 2, 4, 24, 25, 26, 27, 28, 29, 30, 31)
HATTN_WGMMA_F32(56, 2, 2, 8, 28, 29, 30, 31, 32, 33, 34, 35)
HATTN_WGMMA_F32(64, 3, 3, 2, 32, 33, 34, 35, 36, 37, 38, 39)
HATTN_WGMMA_F32(72, 3, 3, 6, 36, 37, 38, 39, 40, 41, 42, 43)
HATTN_WGMMA_F32(80, 3, 3, 10, 40, 41, 42, 43, 44, 45, 46, 47)
HATTN_WGMMA_F32(88, 4, 4, 4, 44, 45, 46, 47, 48, 49, 50, 51)
HATTN_WGMMA_F32(96, 4, 4, 8, 48, 49, 50, 51, 52, 53, 54, 55)
HATTN_WGMMA_F32(104, 5, 5, 2, 52, 53, 54, 55, 56, 57, 58, 59)
HATTN_WGMMA_F32(112, 5, 5, 6, 56, 57, 58, 59, 60, 61, 62, 63)
HATTN_WGMMA_F32(120, 5, 5, 10, 60, 61, 62, 63, 64, 65, 66, 67)
HATTN_WGMMA_F32(128, 6, 6, 4, 64, 65, 66, 67, 68, 69, 70, 71)
HATTN_WGMMA_F32(136, 6, 6, 8, 68, 69, 70, 71, 72, 73, 74, 75)
HATTN_WGMMA_F32(144, 7, 7, 2, 72, 73, 74, 75, 76, 77, 78, 79)
HATTN_WGMMA_F32(152, 7, 7, 6, 76, 77, 78, 79, 80, 81, 82, 83)
HATTN_WGMMA_F32(160, 7, 7, 10, 80, 81, 82, 83, 84, 85, 86, 87)
HATTN_WGMMA_F32(168, 8, 8, 4, 84, 85, 86, 87, 88, 89, 90, 91)
HATTN_WGMMA_F32(176, 8, 8, 8, 88, 89, 90, 91, 92, 93, 94, 95)
HATTN_WGMMA_F32(184, 9, 9, 2, 92, 93, 94, 95, 96, 97, 98, 99)
HATTN_WGMMA_F32(192, 9, 9, 6, 96, 97, 98, 99, 100, 101, 102, 103)
HATTN_WGMMA_F32(200, 9, 9, 10, 100, 101, 102, 103, 104, 105, 106, 107)
HATTN_WGMMA_F32(208, 10, 10, 4, 104, 105, 106, 107, 108, 109, 110, 111)
HATTN_WGMMA_F32(216, 10, 10, 8, 108, 109, 110, 111, 112, 113, 114, 115)
HATTN_WGMMA_F32(224, 11, 11, 2, 112, 113, 114, 115, 116, 117, 118, 119)
HATTN_WGMMA_F32(232, 11, 11, 6, 116, 117, 118, 119, 120, 121, 122, 123)
HATTN_WGMMA_F32(240, 11, 11, 10, 120, 121, 122, 123, 124, 125, 126, 127)
HATTN_WGMMA_F32(248, 12, 12, 4, 124, 125, 126, 127, 128, 129, 130, 131)
HATTN_WGMMA_F32(256, 12, 12, 8, 128, 129, 130, 131, 132, 133, 134, 135)
HATTN_WGMMA_F16(8, 0, , 2, 2, 3, 4, 5, 6, 7, 8, 9)
HATTN_WGMMA_F16(16, 0, , 4, 4, 5, 6, 7, 8, 9, 10, 11)
HATTN_WGMMA_F16(24, 0, , 6, 6, 7, 8, 9, 10, 11, 12, 13)
HATTN_WGMMA_F16(32, 0, , 8, 8, 9, 10, 11, 12, 13, 14, 15)
HATTN_WGMMA_F16(40, 0, , 10, 10, 11, 12, 13, 14, 15, 16, 17)
HATTN_WGMMA_F16(48, 1, 1, 2, 12, 13, 14, 15, 16, 17, 18, 19)
HATTN_WGMMA_F16(56, 1, 1, 4, 14, 15, 16, 17, 18, 19, 20, 21)
HATTN_WGMMA_F16(64, 1, 1, 6, 16, 17, 18, 19, 20, 21, 22, 23)
HATTN_WGMMA_F16(72, 1, 1, 8, 18, 19, 20, 21, 22, 23, 24, 25)
HATTN_WGMMA_F16(80, 1, 1, 10, 20, 21, 22, 23, 24, 25, 26, 27)
HATTN_WGMMA_F16(88, 2, 2, 2, 22, 23, 24, 25, 26, 27, 28, 29)
HATTN_WGMMA_F16(96, 2, 2, 4, 24, 25, 26, 27, 28, 29, 30, 31)
HATTN_WGMMA_F16(104, 2, 2, 6, 26, 27, 28, 29, 30, 31, 32, 33)
HATTN_WGMMA_F16(112, 2, 2, 8, 28, 29, 30, 31, 32, 33, 34, 35)
HATTN_WGMMA_F16(120, 2, 2, 10, 30, 31, 32, 33, 34, 35, 36, 37)
HATTN_WGMMA_F16(128, 3, 3, 2, 32, 33, 34, 35, 36, 37, 38, 39)
HATTN_WGMMA_F16(136, 3, 3, 4, 34, 35, 36, 37, 38, 39, 40, 41)
HATTN_WGMMA_F16(144, 3, 3, 6, 36, 37, 38, 39, 40, 41, 42, 43)
HATTN_WGMMA_F16(152, 3, 3, 8, 38, 39, 40, 41, 42, 43, 44, 45)
HATTN_WGMMA_F16(160, 3, 3, 10, 40, 41, 42, 43, 44, 45, 46, 47)
HATTN_WGMMA_F16(168, 4, 4, 2, 42, 43, 44, 45, 46, 47, 48, 49)
HATTN_WGMMA_F16(176, 4, 4, 4, 44, 45, 46, 47, 48, 49, 50, 51)
HATTN_WGMMA_F16(184, 4, 4, 6, 46, 47, 48, 49, 50, 51, 52, 53)
HATTN_WGMMA_F16(192, 4, 4, 8, 48, 49, 50, 51, 52, 53, 54, 55)
HATTN_WGMMA_F16(200, 4, 4, 10, 50, 51, 52, 53, 54, 55, 56, 57)
HATTN_WGMMA_F16(208, 5, 5, 2, 52, 53, 54, 55, 56, 57, 58, 59)
HATTN_WGMMA_F16(216, 5, 5, 4, 54, 55, 56, 57, 58, 59, 60, 61)
HATTN_WGMMA_F16(224, 5, 5, 6, 56, 57, 58, 59, 60, 61, 62, 63)
HATTN_WGMMA_F16(232, 5, 5, 8, 58, 59, 60, 61, 62, 63, 64, 65)
HATTN_WGMMA_F16(240, 5, 5, 10, 60, 61, 62, 63, 64, 65, 66, 67)
HATTN_WGMMA_F16(248, 6, 6, 2, 62, 63, 64, 65, 66, 67, 68, 69)
HATTN_WGMMA_F16(256, 6, 6, 4, 64, 65, 66, 67, 68, 69, 70, 71)
// clang-format on

#undef HATTN_WGMMA_F16
#undef HATTN_WGMMA_F32
#undef HATTN_WGMMA

}  // namespace hattn::sm90
