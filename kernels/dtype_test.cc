// SPDX-License-Identifier: Apache-2.0
// Conversions of element types: every 16-bit and 8-bit number, and rounding against the compiler's half type and
// against neighbours found by search.
#include "kernels/dtype.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels/convert.h"
#include "kernels/testing/random.h"

namespace ashlar::kernels::testing {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Format {
  const char* name;
  DType dtype;
  uint32_t (*from)(float);
  float (*to)(uint32_t);
  int bits;
  bool infinities;
  float largest, least_normal, least;
};
void PrintTo(const Format& format, std::ostream* out) {
  *out << format.name;
}

const Format kFormats[] = {
    {"fp16", DType::kF16, Half::From, Half::To, 16, true, 65504, 0x1p-14f, 0x1p-24f},
    {"bf16", DType::kBF16, BFloat16::From, BFloat16::To, 16, true, 0x1.fep127f, 0x1p-126f, 0x1p-133f},
    {"e4m3", DType::kF8E4M3, Float8E4M3::From, Float8E4M3::To, 8, false, 448, 0x1p-6f, 0x1p-9f},
    {"e5m2", DType::kF8E5M2, Float8E5M2::From, Float8E5M2::To, 8, true, 57344, 0x1p-14f, 0x1p-16f},
};

class FormatTest : public ::testing::TestWithParam<Format> {
 protected:
  const Format& format() const { return GetParam(); }
  uint32_t Patterns() const { return 1u << format().bits; }
  uint32_t Sign() const { return Patterns() / 2; }
};

TEST_P(FormatTest, EveryNumberComesBack) {
  int nans = 0, infinite = 0;
  for (uint32_t bits = 0; bits < Patterns(); ++bits) {
    const float value = format().to(bits);
    infinite += std::isinf(value);
    if (std::isnan(value)) {
      ++nans;
      const uint32_t again = format().from(value);
      EXPECT_TRUE(std::isnan(format().to(again)));
      continue;
    }
    ASSERT_EQ(format().from(value), bits) << value;
    ASSERT_EQ(std::signbit(value), bits >= Sign());
  }
  EXPECT_EQ(infinite, format().infinities ? 2 : 0);
  EXPECT_EQ(nans % 2, 0);
  EXPECT_TRUE(format().infinities || nans == 2) << nans;
}

TEST_P(FormatTest, NumbersAscendToTheLargestValue) {
  for (uint32_t bits = 0; bits + 1 < Sign(); ++bits) {
    const float value = format().to(bits), next = format().to(bits + 1);
    if (std::isnan(next)) break;
    ASSERT_LT(value, next) << bits;
  }
  EXPECT_EQ(format().to(1), format().least);
  EXPECT_EQ(format().to(Sign()), 0.0f);
  EXPECT_TRUE(std::signbit(format().to(Sign())));
  const uint32_t largest = format().from(format().largest);
  EXPECT_EQ(format().to(largest), format().largest);
  const float beyond = format().to(largest + 1);
  EXPECT_TRUE(format().infinities ? beyond == kInfinity : std::isnan(beyond));
  EXPECT_TRUE(format().bits == 16 || LargestFinite(format().dtype) == format().largest);
}

// Between any two neighbours the nearer one wins, and a tie rounds to the even one. Midpoints and their neighbours are
// exact in fp32.
TEST_P(FormatTest, RoundsToNearestAndTiesToEven) {
  for (uint32_t bits = 0; bits + 1 < Sign(); ++bits) {
    const float low = format().to(bits), high = format().to(bits + 1);
    if (!std::isfinite(high)) break;
    const auto middle = static_cast<float>((double{low} + high) / 2);
    const uint32_t even = bits % 2 == 0 ? bits : bits + 1;
    ASSERT_EQ(format().from(middle), even) << low << " and " << high;
    ASSERT_EQ(format().from(-middle), even | Sign());
    ASSERT_EQ(format().from(std::nextafter(middle, 0.0f)), bits);
    ASSERT_EQ(format().from(std::nextafter(middle, kInfinity)), bits + 1);
  }
}

TEST_P(FormatTest, OverflowsFromHalfAStepBeyondTheLargest) {
  const uint32_t largest = format().from(format().largest);
  const double step = double{format().largest} - format().to(largest - 1);
  // bf16 has the range of fp32: half a step beyond its largest number is still an fp32 number.
  const auto edge = static_cast<float>(format().largest + step / 2);
  const auto overflows = [&](float value) {
    const float back = format().to(format().from(value));
    return format().infinities ? std::isinf(back) && std::signbit(back) == std::signbit(value) : std::isnan(back);
  };
  EXPECT_EQ(format().from(std::nextafter(edge, 0.0f)), largest);
  // A tie rounds to the even pattern. Beyond the largest number that is infinity, except for e4m3, whose largest number
  // is even.
  EXPECT_EQ(overflows(edge), largest % 2 == 1);
  EXPECT_EQ(largest % 2 == 0, format().dtype == DType::kF8E4M3);
  EXPECT_TRUE(overflows(std::nextafter(edge, kInfinity)));
  EXPECT_TRUE(overflows(kInfinity));
  EXPECT_TRUE(overflows(-kInfinity));
  EXPECT_TRUE(overflows(std::numeric_limits<float>::max()));
  EXPECT_TRUE(std::isnan(format().to(format().from(std::numeric_limits<float>::quiet_NaN()))));
}

TEST_P(FormatTest, UnderflowsToZeroOfItsSign) {
  const float half = format().least / 2;
  EXPECT_EQ(format().from(half), 0u) << "a tie with zero, which is even";
  EXPECT_EQ(format().from(std::nextafter(half, 1.0f)), 1u);
  EXPECT_EQ(format().from(-half), Sign());
  EXPECT_EQ(format().from(-0.0f), Sign());
  EXPECT_EQ(format().from(std::numeric_limits<float>::denorm_min()), 0u);
}

// UnitRoundoff bounds the error within the normal range, and the bound is tight.
TEST_P(FormatTest, ErrsByNoMoreThanTheUnitRoundoff) {
  const uint64_t seed = FreshSeed();
  SCOPED_TRACE("ASHLAR_SEED=" + std::to_string(seed));
  Random random(seed);
  double worst = 0;
  for (int i = 0; i < 20000; ++i) {
    const double exponent = random.Uniform(std::log2(format().least_normal), std::log2(format().largest) - 1);
    const auto value = static_cast<float>(std::exp2(exponent));
    const float back = format().to(format().from(value));
    worst = std::max(worst, std::fabs(double{back} - value) / value);
  }
  EXPECT_LE(worst, UnitRoundoff(format().dtype));
  EXPECT_GE(worst, 0.8 * UnitRoundoff(format().dtype));
}

TEST_P(FormatTest, ArrayElementsUseTheSameConversion) {
  std::vector<uint8_t> bytes(4 * ElementBytes(format().dtype), 0xff);
  WriteElement(format().dtype, bytes.data(), 2, 1.5f);
  WriteElement(format().dtype, bytes.data(), 1, -0.75f);
  EXPECT_EQ(ReadElement(format().dtype, bytes.data(), 2), 1.5f);
  EXPECT_EQ(ReadElement(format().dtype, bytes.data(), 1), -0.75f);
  for (size_t i = 0; i < ElementBytes(format().dtype); ++i) {
    EXPECT_EQ(bytes[i], 0xff);
    EXPECT_EQ(bytes[3 * ElementBytes(format().dtype) + i], 0xff);
  }
  EXPECT_EQ(ElementBytes(format().dtype) * 8, static_cast<size_t>(format().bits));
}

// Every pattern of fp32's upper half, with lower halves around ties and random ones.
TEST_P(FormatTest, ArraysAreRoundedLikeElements) {
  const uint64_t seed = FreshSeed();
  SCOPED_TRACE("ASHLAR_SEED=" + std::to_string(seed));
  Random random(seed);
  const size_t bytes = ElementBytes(format().dtype);
  for (uint32_t upper = 0; upper < 1u << 16; ++upper) {
    std::vector<float> values;
    for (const uint32_t lower : {0x0000, 0x0001, 0x0fff, 0x1000, 0x1001, 0x3000, 0x7fff, 0x8000, 0x8001, 0xffff}) {
      values.push_back(std::bit_cast<float>(upper << 16 | lower));
    }
    for (int i = 0; i < 4; ++i) {
      values.push_back(std::bit_cast<float>(upper << 16 | static_cast<uint32_t>(random.Integer(0, 0xffff))));
    }
    std::vector<uint8_t> expected(values.size() * bytes), actual(values.size() * bytes);
    for (size_t i = 0; i < values.size(); ++i) {
      WriteElement(format().dtype, expected.data(), static_cast<int64_t>(i), values[i]);
    }
    WriteElements(format().dtype, actual.data(), values.data(), values.size());
    ASSERT_EQ(actual, expected) << upper;
  }
}

INSTANTIATE_TEST_SUITE_P(Every, FormatTest, ::testing::ValuesIn(kFormats),
                         [](const auto& instance) { return std::string(instance.param.name); });

#if defined(__FLT16_MANT_DIG__)
// Compared with the compiler's half: all of its numbers, and random fp32 patterns of every kind.
TEST(HalfTest, MatchesTheCompilersType) {
  const auto bits_of = [](_Float16 value) {
    uint16_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return uint32_t{bits};
  };
  for (uint32_t bits = 0; bits < 1u << 16; ++bits) {
    const auto narrow = static_cast<uint16_t>(bits);
    _Float16 value;
    std::memcpy(&value, &narrow, sizeof value);
    const auto expected = static_cast<float>(value);
    const float actual = Half::To(bits);
    ASSERT_TRUE(actual == expected || (std::isnan(actual) && std::isnan(expected))) << bits;
  }
  const uint64_t seed = FreshSeed();
  SCOPED_TRACE("ASHLAR_SEED=" + std::to_string(seed));
  Random random(seed);
  for (int i = 0; i < 200000; ++i) {
    // Any pattern, or one with an exponent near half's range.
    auto pattern = static_cast<uint32_t>(random.Integer(0, UINT32_MAX));
    if (i % 2 == 0) pattern = (pattern & 0x807fffff) | static_cast<uint32_t>(random.Integer(100, 145)) << 23;
    const auto value = std::bit_cast<float>(pattern);
    if (std::isnan(value)) continue;
    ASSERT_EQ(Half::From(value), bits_of(static_cast<_Float16>(value))) << value;
  }
}
#endif

}  // namespace
}  // namespace ashlar::kernels::testing
