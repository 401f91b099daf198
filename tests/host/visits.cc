// Compares the kernels' arithmetic of masks (common/mask.hpp, common/visits.hpp) with a mask's definition, on the host.
//
// Standard input has problems, each a line of numbers:
//     class seqlen_q seqlen_kv left_offset right_offset step multiplier shift prefix_last
// and then a line with two numbers for each query: the first key that it keeps, and the one after the last, as
// Mask::keep says (tests/tests/visits.rs). The first difference is printed, and ends the program with 1.
#include "common/visits.hpp"

#include <cstdio>
#include <cstdlib>
#include <vector>

using namespace hattn;

namespace {

struct Problem {
  Band band;
  std::vector<int> first;  // of each query
  std::vector<int> end;

  bool keeps(int query, int key) const { return first[query] <= key && key < end[query]; }
};

long checks = 0;

// Names what is wrong, and where.
#define CHECK(condition, ...)                                                                 \
  do {                                                                                        \
    ++checks;                                                                                 \
    if (!(condition)) {                                                                       \
      std::printf("line %d: %s does not hold: ", __LINE__, #condition);                       \
      std::printf(__VA_ARGS__);                                                               \
      std::printf(" (%d queries, %d keys)\n", problem.band.seqlen_q, problem.band.seqlen_kv); \
      std::exit(1);                                                                           \
    }                                                                                         \
  } while (false)

// What a block of queries keeps of a block of keys.
enum class Kept { None, Some, All };
Kept kept(Problem const& problem, int first_query, int queries, int first_key, int keys) {
  bool any = false;
  bool all = first_key + keys <= problem.band.seqlen_kv;
  for (int query = first_query; query < std::min(first_query + queries, problem.band.seqlen_q); ++query) {
    int const first = std::max(problem.first[query], first_key);
    int const end = std::min(problem.end[query], std::min(first_key + keys, problem.band.seqlen_kv));
    any = any || first < end;
    all = all && end - first == keys;
  }
  return !any ? Kept::None : all ? Kept::All : Kept::Some;
}

// The visits of some of a tile's rows, as the loops of the kernels make them: an edge, free blocks, another edge.
template <MaskClass kMask, int kRows, int kTileN>
void walk(Problem const& problem, KeyVisits const& visits, int first_row, int ways) {
  int const blocks = ceil_div(problem.band.seqlen_kv, kTileN);
  std::vector<int> seen(blocks + 2, 0);
  for (int way = 0; way < ways; ++way) {
    auto const step = [&](int visit, bool masked) {
      CHECK(visit >= 0 && visit < std::max(blocks, 1), "rows from %d visit block %d", first_row, visit);
      seen[visit] += 1;
      Kept const of_block = kept(problem, first_row, kRows, visit * kTileN, kTileN);
      CHECK(masked || of_block == Kept::All, "rows from %d, block %d is not masked", first_row, visit);
    };
    KeyVisits own = visits;
    own.end -= way;
    if (own.count() <= 0) {
      continue;
    }
    int visit = own.first();
    step(visit, kMask != MaskClass::Full || problem.band.seqlen_kv % kTileN != 0);
    visit -= ways;
    if (kMask != MaskClass::Full) {
      bool const masked = ways == 1 ? own.on_right_edge(visit) : own.has(visit) && own.on_right_edge(visit + 1);
      if (masked) {
        step(visit, true);
        visit -= ways;
      }
    }
    for (; own.before_left_edge(visit); visit -= ways) {
      step(visit, false);
    }
    for (; own.has(visit); visit -= ways) {
      step(visit, true);
    }
  }
  for (int block = 0; block < blocks; ++block) {
    bool const needed = kept(problem, first_row, kRows, block * kTileN, kTileN) != Kept::None;
    CHECK(seen[block] <= 1 && seen[block] >= static_cast<int>(needed), "rows from %d, block %d seen %d times",
          first_row, block, seen[block]);
  }
}

template <MaskClass kMask, int kRows, int kTileN>
void check_run(Problem const& problem, KeyVisits const& visits, int first_row, bool whole) {
  int const blocks = ceil_div(problem.band.seqlen_kv, kTileN);
  int first = blocks;
  int last = -1;
  for (int block = 0; block < blocks; ++block) {
    Kept const of_block = kept(problem, first_row, kRows, block * kTileN, kTileN);
    if (of_block != Kept::None) {
      first = std::min(first, block);
      last = block;
    }
    if (visits.contains(block)) {
      bool const free = !visits.on_edge(block);
      CHECK(free == (of_block == Kept::All), "rows from %d, block %d is %sfree", first_row, block, free ? "" : "not ");
    }
  }
  CHECK(visits.count() >= 1 && visits.begin >= 0 && visits.end <= std::max(1, blocks), "rows from %d visit %d to %d",
        first_row, visits.begin, visits.end);
  if (last < 0) {
    CHECK(!whole || kMask != MaskClass::Window || visits.count() == 1, "rows from %d have no key", first_row);
  } else {
    CHECK(visits.end == last + 1, "rows from %d end with %d", first_row, visits.end);
    CHECK(visits.begin == (kMask == MaskClass::Window ? first : 0), "rows from %d begin with %d", first_row,
          visits.begin);
  }
  // The loop masks two blocks on the right edge, no more.
  int const edge = visits.end - std::max(visits.begin, visits.free_end);
  CHECK(kRows > kTileN || visits.free_end < visits.free_begin || edge <= 2, "rows from %d: %d blocks on the right edge",
        first_row, edge);
  if (kRows <= kTileN) {
    walk<kMask, kRows, kTileN>(problem, visits, first_row, 1);
    walk<kMask, kRows, kTileN>(problem, visits, first_row, 2);
  }
}

// A tile of kTileM queries against blocks of kTileN keys, its strips of kRows queries, and shares of its keys.
template <MaskClass kMask, int kTileM, int kTileN, int kRows>
void check_forward(Problem const& problem) {
  Band const& band = problem.band;
  int before = 0;
  for (int m_block = 0; m_block * kTileM < band.seqlen_q; ++m_block) {
    KeyVisits const visits = KeyVisits::of<kMask, kTileM, kTileN>(band, m_block);
    check_run<kMask, kTileM, kTileN>(problem, visits, m_block * kTileM, true);
    CHECK(visits.end >= before, "tile %d ends before the one before it", m_block);
    before = visits.end;
    for (int strip = m_block * (kTileM / kRows); strip < (m_block + 1) * (kTileM / kRows); ++strip) {
      if (strip * kRows >= band.seqlen_q || kMask == MaskClass::Full) {
        continue;
      }
      KeyVisits const own = KeyVisits::of_rows<kMask, kRows, kTileN>(band, strip, visits);
      CHECK(own.begin >= visits.begin && own.end <= visits.end, "strip %d visits more than its tile", strip);
      check_run<kMask, kRows, kTileN>(problem, own, strip * kRows, false);
    }
    for (int shares = 2; shares <= 3; ++shares) {
      int expected = visits.end;
      for (int share = 0; share < shares; ++share) {
        KeyVisits part = visits;
        part.keep_share(share, shares);
        CHECK(part.end == expected, "share %d of tile %d", share, m_block);
        expected = part.begin;
      }
      CHECK(expected == visits.begin, "shares of tile %d", m_block);
    }
  }
}

// The elements that the masks of both passes take away, of the blocks that kernels mask.
template <MaskClass kMask, int kTileM, int kTileN>
void check_elements(Problem const& problem) {
  Band const& band = problem.band;
  std::vector<float> scores(kTileN / 2);
  auto const at = [&](int i) -> float& { return scores[i]; };
  for (int row = 0; row < band.seqlen_q; row = row % 8 == 7 ? row + 9 : row + 1) {
    for (int n_block = 0; n_block * kTileN < band.seqlen_kv; ++n_block) {
      auto const keys = keys_before_edge<kMask, kTileN>(band, row, n_block);
      for (int column = 0; column < 8; column += 2) {
        scores.assign(scores.size(), 0.0F);
        apply_mask<kMask, kTileN>(at, band, row, column, n_block);
        for (int i = 0; i < kTileN / 2; ++i) {
          int const query = row + i / 2 % 2 * 8;
          int const key = n_block * kTileN + i / 4 * 8 + column + i % 2;
          if (query < band.seqlen_q) {
            bool const keeps = key < band.seqlen_kv && problem.keeps(query, key);
            CHECK(keeps == (scores[i] == 0.0F), "query %d, key %d", query, key);
          }
        }
      }
      for (int r = 0; r < 2; ++r) {
        if (row + 8 * r < band.seqlen_q) {
          // (Where the left edge hides all keys of a row, where its right edge is does not matter.)
          int const end = problem.end[row + 8 * r] - n_block * kTileN;
          bool const has_keys = problem.first[row + 8 * r] < problem.end[row + 8 * r];
          CHECK(!has_keys || keys.of[r] == std::max(1, std::min(kTileN, end)), "query %d, block %d: %d keys",
                row + 8 * r, n_block, keys.of[r]);
        }
      }
    }
  }
  scores.resize(kTileM / 2);
  for (int key = 0; key < band.seqlen_kv; key = key % 8 == 7 ? key + 9 : key + 1) {
    for (int m_block = 0; m_block * kTileM < band.seqlen_q; ++m_block) {
      for (int query = 0; query < 8; query += 2) {
        scores.assign(scores.size(), 0.0F);
        apply_mask_transposed<kMask, kTileM>(at, band, key, m_block * kTileM + query);
        for (int i = 0; i < kTileM / 2; ++i) {
          int const of_key = key + i / 2 % 2 * 8;
          int const of_query = m_block * kTileM + i / 4 * 8 + query + i % 2;
          if (of_query < band.seqlen_q) {
            bool const keeps = of_key < band.seqlen_kv && problem.keeps(of_query, of_key);
            CHECK(keeps == (scores[i] == 0.0F), "transposed: query %d, key %d", of_query, of_key);
          }
        }
      }
    }
  }
}

// A tile of kTileN keys against blocks of kTileM queries.
template <MaskClass kMask, int kTileM, int kTileN>
void check_backward(Problem const& problem) {
  Band const& band = problem.band;
  int const m_blocks = ceil_div(band.seqlen_q, kTileM);
  int const n_tiles = ceil_div(band.seqlen_kv, kTileN);
  std::vector<QueryVisits> visits;
  for (int n_block = 0; n_block < n_tiles; ++n_block) {
    visits.push_back(QueryVisits::blocks_of<kMask, kTileM, kTileN>(band, n_block));
    QueryVisits const& own = visits.back();
    CHECK(own.count() >= 1 && own.begin >= 0 && own.end <= m_blocks, "tile %d visits %d to %d", n_block, own.begin,
          own.end);
    int needed = 0;
    for (int m_block = 0; m_block < m_blocks; ++m_block) {
      Kept const of_block = kept(problem, m_block * kTileM, kTileM, n_block * kTileN, kTileN);
      bool const visited = own.begin <= m_block && m_block < own.end;
      needed += static_cast<int>(of_block != Kept::None);
      CHECK(visited || of_block == Kept::None, "tile %d does not visit block %d", n_block, m_block);
      // The last block's rows past the end count.
      bool const free = is_free<kMask, kTileM, kTileN>(band, m_block, n_block);
      CHECK(!free || of_block == Kept::All, "tile %d, block %d is not free", n_block, m_block);
      bool const whole = (m_block + 1) * kTileM <= band.seqlen_q;
      CHECK(free || !whole || of_block != Kept::All, "tile %d, block %d is free", n_block, m_block);
      bool const hidden = is_hidden<kMask, kTileM, kTileN>(band, m_block, n_block);
      CHECK(!hidden || of_block == Kept::None, "tile %d, block %d is not hidden", n_block, m_block);
    }
    CHECK(kMask != MaskClass::Window || own.count() == std::max(1, needed), "tile %d visits %d blocks of %d", n_block,
          own.count(), needed);
  }
  for (int m_block = 0; m_block < m_blocks; ++m_block) {
    KeyTiles const tiles = KeyTiles::of<kMask, kTileM, kTileN>(band, m_block);
    for (int n_block = 0; n_block < n_tiles; ++n_block) {
      bool const visits_it = visits[n_block].begin <= m_block && m_block < visits[n_block].end;
      bool const listed = tiles.begin <= n_block && n_block < tiles.end;
      CHECK(visits_it == listed, "tile %d among those that add to block %d", n_block, m_block);
    }
  }
}

// The ends of each query's interval, and the inverse.
template <MaskClass kMask>
void check_ends(Problem const& problem) {
  Band const& band = problem.band;
  for (int query = 0; query < band.seqlen_q; ++query) {
    int const first = band.first_key<kMask>(query);
    int const end = std::min(band.seqlen_kv, band.last_key<kMask>(query) + 1);
    bool const has_keys = problem.first[query] < problem.end[query];
    CHECK(first >= 0 && has_keys == (first < end), "query %d keeps %d to %d", query, first, end);
    CHECK(!has_keys || (first == problem.first[query] && end == problem.end[query]), "query %d keeps %d to %d", query,
          first, end);
  }
  if constexpr (kMask != MaskClass::Full) {
    for (int key = 0; key < band.seqlen_kv; ++key) {
      int const first = band.first_query<kMask>(key);
      int const end = kMask == MaskClass::Window ? std::min(band.seqlen_q, band.last_query(key) + 1) : band.seqlen_q;
      for (int query = 0; query < band.seqlen_q; ++query) {
        CHECK(problem.keeps(query, key) == (first <= query && query < end), "key %d is kept by %d to %d, not %d", key,
              first, end, query);
      }
    }
  }
}

template <MaskClass kMask>
void check(Problem const& problem) {
  check_ends<kMask>(problem);
  check_forward<kMask, 16, 8, 8>(problem);
  check_forward<kMask, 16, 16, 4>(problem);
  check_forward<kMask, 24, 40, 8>(problem);
  check_forward<kMask, 128, 128, 64>(problem);
  check_forward<kMask, 128, 64, 32>(problem);
  check_forward<kMask, 128, 80, 64>(problem);
  check_forward<kMask, 192, 96, 64>(problem);
  check_forward<kMask, 128, 32, 16>(problem);
  check_elements<kMask, 16, 24>(problem);
  check_elements<kMask, 64, 128>(problem);
  check_backward<kMask, 8, 16>(problem);
  check_backward<kMask, 16, 16>(problem);
  check_backward<kMask, 64, 128>(problem);
  check_backward<kMask, 128, 128>(problem);
  check_backward<kMask, 32, 64>(problem);
}

}  // namespace

int main() {
  long problems = 0;
  for (int mask = 0;; ++problems) {
    Problem problem{};
    Band& band = problem.band;
    int const read = std::scanf("%d %d %d %d %d %d %u %d %d", &mask, &band.seqlen_q, &band.seqlen_kv, &band.left_offset,
                                &band.right_offset, &band.edges.step, &band.edges.multiplier, &band.edges.shift,
                                &band.edges.prefix_last);
    if (read != 9) {
      break;
    }
    problem.first.resize(band.seqlen_q);
    problem.end.resize(band.seqlen_q);
    for (int query = 0; query < band.seqlen_q; ++query) {
      if (std::scanf("%d %d", &problem.first[query], &problem.end[query]) != 2) {
        std::printf("a problem lacks queries\n");
        return 2;
      }
    }
    switch (mask) {
      case 0:
        check<MaskClass::Full>(problem);
        break;
      case 1:
        check<MaskClass::Causal>(problem);
        break;
      default:
        check<MaskClass::Window>(problem);
        break;
    }
  }
  std::printf("%ld problems, %ld checks\n", problems, checks);
  return 0;
}
