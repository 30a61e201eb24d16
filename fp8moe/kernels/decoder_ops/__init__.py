"""Decoder operations other than the experts: norms, rotary embedding, attention, router, sampling."""
