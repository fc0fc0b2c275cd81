"""Communication between ranks: exchanges of halos, redistributions, reductions, also within compiled graphs.

`needs` plans in numbers which rank sends which elements, `route` packs and sends them, `exchange` and `redistribution`
use both. The files `graph_*`, `compilers`, `merging` and `unread` are for graphs of torch.compile.
"""
