-- checkpoint: append response tokens at an offset, and renew the leases.
-- KEYS: leases sample chunks weights stats config
-- ARGV: worker | id token offset count version chunk
-- REPLY: {current, last_good, {tokens now stored an item, or -1: the lease is lost}}
--   fewer than offset + count: something is missing here; send again from that token
-- INVARIANT: tokens are stored once, in order, by the holder of the lease only.
local lease_ms = config('lease_ms')[1]
for i = 1, ITEMS do
  local _, _, offset, n, version, chunk = item(i)
  if whole(offset, 'offset') < 0 or whole(n, 'count') < 1 or whole(version, 'version') < 0 then
    error('ROLLQ a chunk needs offset >= 0, count >= 1 and version >= 0', 0)
  end
  if #chunk > 4194304 then
    error('ROLLQ a chunk has at most 4 MiB, this one ' .. #chunk, 0)
  end
end
local at = now()
local added = 0
local answers = {}
for i = 1, ITEMS do
  local id, token, offset, n, version, chunk = item(i)
  offset, n = tonumber(offset), tonumber(n)
  local s = sample(id)
  if not holds(s, token) then
    answers[i] = -1
  else
    if offset == s.tokens then
      call('RPUSH', K.chunks .. id, chunk)
      s.tokens = s.tokens + n
      added = added + n
      call('HSET', K.sample .. id, 'tokens', s.tokens, 'version_last', version)
      if offset == 0 then
        call('HSET', K.sample .. id, 'version_first', version)
      end
    end
    renew(id, at, lease_ms)
    answers[i] = s.tokens
  end
end
count('tokens', added)
local current, good = level()
return {current, good, answers}
