// SPDX-License-Identifier: Apache-2.0
// The haystack of the demo against the numbers of tools/demo_model/README.md, which the model was evaluated on.
#include "haystack.h"

#include <gtest/gtest.h>

#include <numeric>

#include "model/loaded_model.h"
#include "treeattn/error.h"

namespace treeattn::tools {
namespace {

const std::filesystem::path kDemo = TREEATTN_DEMO_DIR;

TEST(Haystack, DrawsTheNumbersOfTheReadme) {
  HaystackRandom random(1);
  std::vector<std::uint64_t> draws;
  for (int i = 0; i < 6; ++i) draws.push_back(random.below(1000));
  EXPECT_EQ(draws, (std::vector<std::uint64_t>{774, 153, 196, 870, 34, 795}));
  EXPECT_EQ(pass_key(1), 80208);
  EXPECT_EQ(pass_key(2), 95460);
  EXPECT_EQ(pass_key(7), 67922);
}

class HaystackTokens : public testing::Test {
 protected:
  void SetUp() override {
    try {
      model_ = model::describe_model(kDemo / "model");
    } catch (const Unavailable& error) {
      GTEST_SKIP() << "*** SKIPPED: " << error.what() << " ***";
    }
    paragraphs_ = read_paragraphs(kDemo / "stories.txt");
    for (const std::string& paragraph : paragraphs_) {
      lengths_.push_back(static_cast<std::int64_t>(encode(paragraph + "\n\n").size()));
    }
  }
  std::vector<std::int32_t> encode(std::string_view text) const { return model_.tokenizer->encode(text); }

  model::ModelDescription model_;
  std::vector<std::string> paragraphs_;
  std::vector<std::int64_t> lengths_;
};

TEST_F(HaystackTokens, OrderIsThatOfTheReadme) {
  const auto check = [&](std::int64_t tokens, std::uint64_t seed, std::size_t count, std::int64_t used,
                         std::size_t before, const std::vector<std::size_t>& first) {
    const HaystackOrder order = haystack_order(lengths_, tokens, 50, seed);
    EXPECT_EQ(order.paragraphs.size(), count);
    EXPECT_EQ(order.before_needle, before);
    EXPECT_EQ(std::vector<std::size_t>(order.paragraphs.begin(), order.paragraphs.begin() + 5), first);
    EXPECT_EQ(std::accumulate(order.paragraphs.begin(), order.paragraphs.end(), std::int64_t{0},
                              [&](std::int64_t sum, std::size_t i) { return sum + lengths_[i]; }),
              used);
  };
  check(1000, 1, 11, 986, 5, {405, 117, 275, 173, 83});
  check(100000, 7, 1061, 99983, 530, {404, 311, 319, 34, 318});
}

TEST_F(HaystackTokens, NeedleStandsWhereItSays) {
  const auto bos = model_.tokenizer->bos().value();
  for (const int depth : {0, 37, 100}) {
    const Haystack hay = make_haystack(
        paragraphs_, [&](std::string_view text) { return encode(text); }, {&bos, 1}, 2000, depth, 7);
    EXPECT_LE(hay.tokens.size(), 2000u);
    EXPECT_EQ(hay.tokens.front(), bos);
    const std::span<const std::int32_t> needle(hay.tokens.data() + hay.needle_first,
                                               static_cast<std::size_t>(hay.needle_end - hay.needle_first));
    EXPECT_EQ(model_.tokenizer->decode(needle), "The pass key is 67922. Remember it.\n\n");
    const std::string all = model_.tokenizer->decode(hay.tokens);
    EXPECT_TRUE(all.ends_with("What is the pass key? The pass key is")) << all.substr(all.size() - 60);
  }
  EXPECT_THROW(make_haystack(
                   paragraphs_, [&](std::string_view text) { return encode(text); }, {&bos, 1}, 10, 50, 7),
               InvalidArgument);
}

}  // namespace
}  // namespace treeattn::tools
