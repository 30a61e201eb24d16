"""What surrounds the experts in a decoder layer: norms, rotary embedding, router, sampling."""
