// SPDX-License-Identifier: Apache-2.0
// Two requests share segments in place, in pages that the daemon allocates (MEPIC), and give the same answers as with
// copies landed for each.
#include <gmock/gmock.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "client/session/shared_pages.h"
#include "examples/rag/staging.h"
#include "examples/refengine/tokenizer.h"
#include "tests/integration/serving_fixture.h"

namespace ashlar::integration {
namespace {

using refengine::CachedLayer;
using refengine::Sequence;
using refengine::SharedSpan;
using refengine::Step;

// An engine without copies: a request references its segments in place, with queries rotated to match.
class InPlaceEngine {
 public:
  InPlaceEngine(const ClientOptions& options, const rag::Runtime& runtime)
      : runtime_(runtime), config_(runtime.model.config()) {
    ClientOptions patient = options;
    patient.timeout = std::chrono::seconds(10);
    client_ = *Client::Connect(patient);
    region_ = *client_->HostRegion(refengine::KvPages::RequiredBytes(config_, kPageTokens, kPages));
    // The engine declares the places of pages; the daemon allocates page numbers.
    pool_ =
        std::make_unique<refengine::KvPages>(config_, kPageTokens, kPages, std::span(region_.data(), region_.size()));
    model_ = *client_->OpenModel(
        runtime.model.identity(),
        runtime.model.layout(static_cast<uint32_t>(kSeams.head), static_cast<uint32_t>(kSeams.tail), kPageTokens));
    PagedCache cache{.page_tokens = kPageTokens, .pages = kPages, .allocate = true};
    for (int32_t i = 0; i < config_.attention_layers(); ++i) {
      const refengine::PagedLayerGeometry layer = pool_->Geometry(i);
      cache.layers.push_back({.layer = layer.layer,
                              .key_offset = layer.key_offset,
                              .value_offset = layer.value_offset,
                              .page_stride = layer.page_stride,
                              .token_stride = layer.token_stride,
                              .key_head_stride = layer.head_stride,
                              .value_head_stride = layer.head_stride});
    }
    const absl::Status declared = model_.DeclarePages(region_, cache);
    EXPECT_TRUE(declared.ok()) << declared;
  }

  struct Request {
    std::optional<Match> match;
    std::optional<Admission> admission;
    std::unique_ptr<Sequence> sequence;
    std::vector<std::vector<CachedLayer>> layers;
    std::vector<Step> chain;
    std::vector<float> logits = std::vector<float>(refengine::kVocabulary);
    int landings = 0;
  };

  std::unique_ptr<Request> Serve(const RagPrompt& prompt) {
    auto request = std::make_unique<Request>();
    const Prompt asked{.tokens = prompt.tokens, .segment_lengths = prompt.segment_lengths};
    request->match = model_.Lookup(asked);
    std::vector<bool> shared(prompt.tokens.size());  // positions
    for (size_t i = 0; i < prompt.segment_lengths.size(); ++i) {
      const auto [begin, end] = Interior(prompt, i);
      std::fill(shared.begin() + begin, shared.begin() + end, true);
    }
    Admitted admitted = model_.Admit(asked, static_cast<uint32_t>(OwnPages(shared)));
    EXPECT_EQ(admitted.outcome, AdmitOutcome::kAdmitted) << admitted.shortage.needed << " pages, of " << kPages;
    if (!admitted.admission.has_value()) return nullptr;
    request->admission = std::move(*admitted.admission);
    Fill(*request);
    Place(prompt, shared, *request);
    BuildChain(prompt, *request);
    const absl::Status advanced =
        runtime_.engine.Advance(*request->sequence, request->chain, {.last_logits = request->logits.data()});
    EXPECT_TRUE(advanced.ok()) << advanced;
    EXPECT_TRUE(request->match->valid());
    return request;
  }

 private:
  static std::pair<int64_t, int64_t> Interior(const RagPrompt& prompt, size_t segment) {
    const auto start = static_cast<int64_t>(prompt.SegmentStart(segment));
    const auto end = start + static_cast<int64_t>(prompt.segment_lengths[segment]);
    if (segment == 0) return {start, end};
    return {start + kSeams.head, end - kSeams.tail};
  }

  // A page of the sequence is the request's own if it holds a position that is not shared.
  static bool IsOwn(const std::vector<bool>& shared, size_t page) {
    const size_t end = std::min(shared.size(), (page + 1) * kPageTokens);
    return std::find(shared.begin() + page * kPageTokens, shared.begin() + end, false) != shared.begin() + end;
  }
  static size_t OwnPages(const std::vector<bool>& shared) {
    size_t own = 0;
    for (size_t page = 0; page * kPageTokens < shared.size(); ++page) own += IsOwn(shared, page);
    return own;
  }

  // Lands each segment that this request fills separately, because their pages are the same for every request. For
  // other segments only the tuples are landed.
  void Fill(Request& request) {
    std::vector<LandSegment> filled;
    for (uint32_t i = 0; i < request.admission->segments().size(); ++i) {
      const Admission::Segment& segment = request.admission->segments()[i];
      if (segment.content != PageContent::kToFill) {
        filled.push_back({.segment = i, .tuples_only = true});
        continue;
      }
      ++request.landings;
      const LandSegment target{i, segment.placement.first_slot};
      const std::vector<int32_t> table = request.admission->PageTable(i);
      EXPECT_THAT(model_.Land(*request.match, table, {&target, 1}).Wait(kPatience),
                  testing::ElementsAre(MissReason::kNone));
      EXPECT_TRUE(request.admission->ReportFilled({&i, 1}));
      request.admission->SetFilled({&i, 1});
    }
    EXPECT_THAT(model_.Land(*request.match, {}, filled).Wait(kPatience), testing::Each(MissReason::kNone));
  }

  void Place(const RagPrompt& prompt, const std::vector<bool>& shared, Request& request) {
    std::vector<int32_t> table;
    size_t own = 0;
    for (size_t page = 0; page * kPageTokens < shared.size(); ++page) {
      table.push_back(IsOwn(shared, page) ? request.admission->own_pages()[own++] : -1);
    }
    std::vector<SharedSpan> spans;
    for (size_t i = 0; i < prompt.segment_lengths.size(); ++i) {
      const PagePlacement& placement = request.admission->segments()[i].placement;
      const auto [begin, end] = Interior(prompt, i);
      spans.push_back(
          {.position = begin,
           .tokens = end - begin,
           .page_table = request.admission->PageTable(i),
           .first_slot = static_cast<int64_t>(placement.first_slot + placement.first_token),
           .origin = static_cast<int64_t>(prompt.SegmentStart(i)) - static_cast<int64_t>(placement.first_slot)});
    }
    request.sequence = std::make_unique<Sequence>(config_, *pool_);
    request.sequence->Place(std::move(table), std::move(spans));
  }

  void BuildChain(const RagPrompt& prompt, Request& request) {
    int64_t computed = 0;
    const auto compute_to = [&](int64_t position) {
      if (position == computed) return;
      request.chain.push_back(Step::Compute(std::span(prompt.tokens).subspan(computed, position - computed)));
    };
    request.layers.resize(prompt.segment_lengths.size());
    for (size_t i = 0; i < prompt.segment_lengths.size(); ++i) {
      ASSERT_NE(request.match->tuples(i), nullptr);
      for (const MappedTuple& tuple : *request.match->tuples(i)) {
        request.layers[i].push_back({tuple.view, static_cast<const float*>(tuple.conv_tail)});
      }
      const auto [begin, end] = Interior(prompt, i);
      compute_to(begin);
      const std::vector<CachedLayer>& layers = request.layers[i];
      request.chain.push_back(i == 0 ? Step::Checkpoint(end - begin, layers) : Step::Cached(end - begin, layers));
      computed = end;
    }
    compute_to(static_cast<int64_t>(prompt.tokens.size()));
  }

  const rag::Runtime runtime_;
  const ModelConfig config_;
  std::unique_ptr<Client> client_;
  Region region_;
  std::unique_ptr<refengine::KvPages> pool_;
  Model model_;
};

TEST_F(Serving, SegmentsSharedInPlaceMatchLandedCopies) {
  const RagPrompt prompts[] = {MakeTestPrompt({1, 2, 3}), MakeTestPrompt({3, 1, 4, 2})};
  ServingEngine copies(daemon_.client_options(), runtime());
  std::vector<std::vector<float>> expected;
  for (const RagPrompt& prompt : prompts) expected.push_back(copies.Serve(prompt).logits);

  InPlaceEngine engine(daemon_.client_options(), runtime());
  const auto first = engine.Serve(prompts[0]);
  const auto second = engine.Serve(prompts[1]);
  ASSERT_TRUE(first != nullptr && second != nullptr);
  EXPECT_LE(rag::RelativeL2(first->logits, expected[0]), kSame);
  EXPECT_LE(rag::RelativeL2(second->logits, expected[1]), kSame);
  // The second request finds the segments that the first one filled: one segment is new, three are at other positions,
  // and so is the prefix.
  EXPECT_EQ(first->landings, 4);
  EXPECT_EQ(second->landings, 1);
  EXPECT_EQ(second->admission->segments()[1].pages, first->admission->segments()[3].pages);
  EXPECT_EQ(second->admission->segments()[2].pages, first->admission->segments()[1].pages);

  // The first continues while the second ends: its shared pages do not change.
  const std::vector<float> before = first->logits;
  second->admission->Release();
  const auto again = engine.Serve(prompts[0]);
  ASSERT_NE(again, nullptr);
  EXPECT_EQ(again->landings, 0);
  EXPECT_LE(rag::RelativeL2(again->logits, before), 1e-6);
}

}  // namespace
}  // namespace ashlar::integration
