-- checkpoint: append response tokens at an offset, and renew the leases.
-- KEYS: leases sample chunks weights stats config
-- ARGV: worker | id token offset count version chunk
-- REPLY: {current, last_good, {tokens now stored an item, or -1: the lease is lost}}
--   fewer than offset + count: something is missing here; send again from that token
-- INVARIANT: tokens are stored once, in order, by the holder of the lease only.
local expiry = text(now() + config('lease_ms')[1])
for i = 1, ITEMS do
  local _, _, offset, n, version, chunk = item(i)
  check_chunk(offset, n, version, chunk)
end
local added = 0
local answers = {}
for i = 1, ITEMS do
  local id, token, offset, n, version, chunk = item(i)
  local s = sample(id)
  if not holds(s, token) then
    answers[i] = -1
  else
    added = added + append(s, offset, n, version, chunk)
    renew(id, expiry)
    answers[i] = s.tokens
  end
end
count('tokens', added)
local current, good = level()
return {current, good, answers}
