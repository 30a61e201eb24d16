// The paged cache of indexer keys, which append_kv.cu writes and mqa_logits.cu reads.
#pragma once

// A block of the cache: the E4M3 values of `Tokens` keys, one key after the other, then their scales.
template <int Tokens>
struct CacheBlock {
  unsigned char keys[Tokens * HEAD_DIM];
  float scales[Tokens];
};
