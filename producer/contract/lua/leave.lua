-- leave: a worker that ends in order takes itself off the list.
-- KEYS: workers worker turns
-- ARGV: worker |
-- REPLY: 1 if it was there
-- INVARIANT: its samples are not touched; it released them, or their leases expire.
call('HDEL', K.turns, A.worker)
call('DEL', K.worker .. A.worker)
return call('ZREM', K.workers, A.worker)
