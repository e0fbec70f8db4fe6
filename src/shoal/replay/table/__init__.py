"""Tables and what they store, without a network: selectors, limiters, chunks, items and the compiled code under them."""
