-- attend: a trainer leaves its mark under its consumer's name.
-- KEYS: trainers
-- ARGV: consumer nonce place |
--   nonce: random, names this client; place: where it runs, for people
-- REPLY: the place of another client whose mark was there, or ''
-- INVARIANT: of two live trainers with one name each finds the other's mark again and again.
local before = call('HGET', K.trainers, A.consumer)
call('HSET', K.trainers, A.consumer, A.nonce .. ' ' .. A.place)
local nonce, place = string.match(before or '', '^(%S*) (.*)$')
return nonce and nonce ~= A.nonce and place or ''
