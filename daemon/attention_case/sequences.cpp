#include "daemon/attention_case/resolve.h"

#include <cstdint>
#include <string>
#include <vector>

namespace cppool::attention_case {
namespace {

using kernels::Sequences;

struct Side {
  const char* lengths;  // the parameters' names
  const char* places;
  const char* max_seqlen;
};
constexpr Side kQueries{"cu_seqlens_q", "cu_seqlens_q_padded", "max_seqlen_q"};
constexpr Side kKeys{"cu_seqlens_kv", "cu_seqlens_kv_padded", "max_seqlen_kv"};

[[noreturn]] void InvalidLengths(const std::string& why) { throw Refused(CPPOOL_INVALID_REQUEST, why); }
bool Given(const Json& params, const char* name) { return !params.at(name).is_null(); }
bool IsThd(const Json& params) { return params.at("qkv_format") == "thd"; }
std::string Text(std::int64_t value) { return std::to_string(value); }

std::vector<std::int64_t> Differences(const Json& cumulated) {
  std::vector<std::int64_t> differences;
  for (std::size_t i = 1; i < cumulated.size(); ++i)
    differences.push_back(cumulated[i].get<std::int64_t>() - cumulated[i - 1].get<std::int64_t>());
  return differences;
}

std::int64_t RoundUp(std::int64_t value, std::int64_t unit) { return (value + unit - 1) / unit * unit; }

// Reads given parameters, which are not yet checked against each other.
Sequences Read(const Json& params, const Side& side, int world_size) {
  const std::int64_t batch = params.at("batch_size"), most = params.at(side.max_seqlen);
  Sequences sequences = kernels::UniformSequences(batch, most);
  sequences.length = Differences(params.at(side.lengths));
  if (Given(params, side.places)) {
    sequences.room = Differences(params.at(side.places));
  } else if (IsThd(params)) {
    for (std::size_t i = 0; i < sequences.room.size(); ++i)
      sequences.room[i] = RoundUp(sequences.length[i], 2 * world_size);
  }
  return sequences;
}

void CheckCumulated(const Json& params, const char* name) {
  const Json& list = params.at(name);
  const auto entries = static_cast<std::size_t>(params.at("batch_size").get<std::int64_t>()) + 1;
  if (list.size() != entries) {
    InvalidLengths(std::string(name) + " has " + Text(static_cast<std::int64_t>(list.size())) +
                   " entries and must have batch_size + 1, which is " +
                   Text(static_cast<std::int64_t>(entries)));
  }
  if (list[0] != 0)
    InvalidLengths(std::string(name) + " begins with " + list[0].dump() + " and must begin with 0");
  const std::vector<std::int64_t> differences = Differences(list);
  for (std::size_t i = 0; i < differences.size(); ++i) {
    if (differences[i] >= 0) continue;
    InvalidLengths(std::string(name) + " falls from " + list[i].dump() + " to " + list[i + 1].dump() +
                   " and must not decrease");
  }
}

// Does what CheckSequences does, for one side.
std::string CheckSide(const Json& params, const Side& side, int world_size) {
  CheckCumulated(params, side.lengths);
  const bool placed = Given(params, side.places);  // else places follow from the world size
  if (placed) CheckCumulated(params, side.places);
  const Sequences sequences = Read(params, side, world_size), in_one = Read(params, side, 1);
  const std::int64_t most = params.at(side.max_seqlen), unit = 2 * world_size;
  std::int64_t places = 0, places_in_one = 0;
  std::string impossible;
  // What fails with one rank fails with any number of them.
  const auto refuse = [&](bool in_any_world, const std::string& why) {
    if (in_any_world) InvalidLengths(why);
    if (impossible.empty()) impossible = why;
  };
  for (std::size_t i = 0; i < sequences.length.size(); ++i) {
    const std::int64_t length = sequences.length[i], room = sequences.room[i];
    const std::string what =
        "sequence " + Text(static_cast<std::int64_t>(i)) + " has " + Text(length) + " tokens";
    if (length > most)
      InvalidLengths(std::string(side.lengths) + ": " + what + ", more than " + side.max_seqlen + ", " +
                     Text(most));
    if (placed && room % unit != 0) {
      refuse(room % 2 != 0, std::string(side.places) + ": sequence " + Text(static_cast<std::int64_t>(i)) +
                                " has " + Text(room) +
                                " places, and must have a number divisible by 2 * world_size, which is " +
                                Text(unit));
    }
    if (length > room) {
      InvalidLengths(std::string(side.lengths) + ": " + what + ", beyond the padded length of " + Text(room) +
                     " that " + side.places + " gives it");
    }
    if (IsThd(params) && length != room && params.at("pad_between_seqs") == false) {
      refuse(length != in_one.room[i], std::string(side.lengths) + ": " + what + " of " + Text(room) +
                                           " places (each sequence takes a multiple of 2 * world_size), "
                                           "which needs pad_between_seqs true");
    }
    places += room;
    places_in_one += in_one.room[i];
  }
  if (places > sequences.rows) {
    refuse(places_in_one > sequences.rows, std::string(placed ? side.places : side.lengths) + " takes " +
                                               Text(places) + " places, and there are batch_size * " +
                                               side.max_seqlen + ", which is " + Text(sequences.rows));
  }
  return impossible;
}

}  // namespace

std::string CheckSequences(const Json& params, int world_size) {
  const bool padding = params.at("attn_mask_type").get<std::string>().starts_with("padding");
  if (params.at("pad_between_seqs") == true && !IsThd(params)) {
    InvalidLengths("pad_between_seqs is for qkv_format 'thd': in '" +
                   params.at("qkv_format").get<std::string>() + "' sequences do not follow each other");
  }
  for (const Side& side : {kQueries, kKeys}) {
    if (Given(params, side.places) && !IsThd(params)) {
      InvalidLengths(std::string(side.places) + " is for qkv_format 'thd': in '" +
                     params.at("qkv_format").get<std::string>() + "' every sequence has " + side.max_seqlen +
                     " places");
    }
    if (Given(params, side.lengths) && !padding) {
      InvalidLengths(std::string(side.lengths) +
                     " gives sequences lengths of their own, which needs qkv_format 'thd' or " +
                     "a padding mask, and attn_mask_type is '" +
                     params.at("attn_mask_type").get<std::string>() + "'");
    }
    if (Given(params, side.places) && !Given(params, side.lengths))
      InvalidLengths(std::string(side.places) + " is given without " + side.lengths);
  }
  const bool queries = Given(params, kQueries.lengths), keys = Given(params, kKeys.lengths);
  if (keys && !queries) InvalidLengths("cu_seqlens_kv is given without cu_seqlens_q");
  std::string impossible = queries ? CheckSide(params, kQueries, world_size) : "";
  if (keys) {
    const std::string for_keys = CheckSide(params, kKeys, world_size);
    if (impossible.empty()) impossible = for_keys;
  } else if (queries && params.at(kQueries.max_seqlen) != params.at(kKeys.max_seqlen)) {
    InvalidLengths(
        "cu_seqlens_kv must be given beside cu_seqlens_q, since max_seqlen_kv is not max_seqlen_q");
  }
  return impossible;
}

void SetSequences(const Json& params, int world_size, kernels::AttentionSpec& spec) {
  if (!Given(params, kQueries.lengths)) return DrawSequences(spec, world_size);
  spec.queries = Read(params, kQueries, world_size);
  spec.keys = Given(params, kKeys.lengths) ? Read(params, kKeys, world_size) : spec.queries;
}

}  // namespace cppool::attention_case
