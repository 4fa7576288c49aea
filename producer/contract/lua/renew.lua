-- renew: keep leases for another lease time.
-- KEYS: leases sample weights config
-- ARGV: worker | id token
-- REPLY: {current, last_good, {1 kept or -1 lost an item}}
-- INVARIANT: only the holder keeps a lease; a lease that is gone does not come back.
local expiry = text(now() + config('lease_ms')[1])
local answers = {}
for i = 1, ITEMS do
  local id, token = item(i)
  local held = call('HMGET', K.sample .. id, 'state', 'lease_token')
  if held[1] == 'leased' and held[2] == token then
    renew(id, expiry)
    answers[i] = 1
  else
    answers[i] = -1
  end
end
local current, good = level()
return {current, good, answers}
