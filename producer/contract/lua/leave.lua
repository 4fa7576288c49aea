-- leave: a worker that ends in order takes itself off the list.
-- KEYS: workers starting worker turns line
-- ARGV: worker |
-- REPLY: 1 if it was there
-- INVARIANT: its samples are not touched; it released them, or their leases expire.
call('DEL', K.worker .. A.worker)
return strike(A.worker)
