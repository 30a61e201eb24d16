// The paged cache of indexer keys, which append_kv.cu writes and mqa_logits.cu reads.
#pragma once

// One block of the cache: the E4M3 values of `Tokens` keys, key after key, followed by the keys' scales.
template <int Tokens>
struct CacheBlock {
  unsigned char keys[Tokens * HEAD_DIM];
  float scales[Tokens];
};
