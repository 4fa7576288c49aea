-- reap: take samples back from holders that stopped renewing. Workers and waiting clients call it.
-- KEYS: ready leases sample group results grading dead stats config
-- ARGV: limit |
-- REPLY: {reaped, dated anew}
-- INVARIANT: if nobody reaped for half a lease (Redis was away) or time went backwards, nobody
--   is blamed: all leases are dated anew.
local limit = math.min(whole(A.limit, 'limit'), 256)
local c = config('lease_ms', 'max_crashes', 'last_reap')
local at = now()
call('HSET', K.config, 'last_reap', text(at))
if not c[3] or at < c[3] or at - c[3] > c[1] / 2 then
  -- All ids first: a new date changes a lease's place in the order.
  local ids = call('ZRANGE', K.leases, 0, -1)
  for from = 1, #ids, 500 do
    local dates = {}
    for i = from, math.min(from + 499, #ids) do
      dates[#dates + 1] = at + c[1]
      dates[#dates + 1] = ids[i]
    end
    call('ZADD', K.leases, unpack(dates))
  end
  return {0, #ids}
end
local expired = call('ZRANGEBYSCORE', K.leases, '-inf', '(' .. text(at), 'LIMIT', 0, limit)
for _, id in ipairs(expired) do
  local s = sample(id)
  local worker = call('HGET', K.sample .. id, 'worker')
  crashed(s, c[2], 'worker ' .. worker .. ' stopped renewing its lease')
end
count('reaped', #expired)
return {#expired, 0}
