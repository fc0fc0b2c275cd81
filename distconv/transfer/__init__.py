"""Communication between ranks: exchanges of halos, redistributions, reductions, also within compiled graphs."""
