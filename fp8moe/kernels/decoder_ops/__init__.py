"""Operations of a decoder outside of its experts: norms, rotary embedding, attention, router, sampling."""
