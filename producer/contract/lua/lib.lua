-- Shared by every script, after the names that scripts.py makes of its header:
-- K.<key name>, A.<scalar argument>, ITEMS (how many), item(i) -> the fields of item i.
-- Redis does not roll back: arguments are checked before the first write.

local call = redis.call
local SUSPECT = 2 ^ 50 -- a sample that was in n crashes waits at (sequence - n * SUSPECT)

local function whole(value, name)
  local n = string.find(value, '^-?%d+$') and tonumber(value)
  if not n or math.abs(n) > 2 ^ 53 then
    error('ROLLQ ' .. name .. ' must be a whole number, not ' .. tostring(value), 0)
  end
  return n
end

local function text(n)
  return string.format('%.0f', n)
end

local function now()
  local t = call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

local function config(...)
  local values = call('HMGET', K.config, 'schema', ...)
  if not values[1] then
    error('NOQUEUE this queue is not set up', 0)
  end
  for i = 2, #values do
    values[i - 1] = tonumber(values[i])
  end
  return values
end

local function count(name, by)
  if by ~= 0 then
    call('HINCRBY', K.stats, name, by)
  end
end

-- current and last good weight version; 0 is what the workers were started with
local function level()
  local w = call('HMGET', K.weights, 'current', 'last_good')
  return tonumber(w[1] or 0), tonumber(w[2] or 0)
end

-- may a worker that serves this version start or go on with samples?
local function serves(version)
  local current, good = level()
  if version == current then
    return true
  end
  return version == good and call('HGET', K.weights, text(current) .. ':state') == 'new'
end

local FIELDS = {'state', 'lease_token', 'group', 'index', 'tokens', 'version_first', 'attempts',
  'crashes', 'interruptions', 'restarts', 'seq', 'worker'}

local function sample(id)
  local v = call('HMGET', K.sample .. id, unpack(FIELDS))
  if not v[1] then
    return nil
  end
  local s = {id = id}
  for i, name in ipairs(FIELDS) do
    s[name] = v[i]
  end
  for _, name in ipairs({'tokens', 'version_first', 'attempts', 'crashes', 'interruptions',
    'restarts', 'seq'}) do
    s[name] = tonumber(s[name])
  end
  return s
end

local function holds(s, token)
  return s and s.state == 'leased' and s.lease_token == token
end

-- the same call again, after its reply was lost: `state` is what the first one made of it
local function repeated(s, token, state)
  return s and s.state == state and s.lease_token == token
end

local function renew(id, at, lease_ms)
  call('ZADD', K.leases, 'XX', at + lease_ms, id)
end

local function make_ready(s)
  local score = s.seq - s.crashes * SUSPECT
  call('ZREM', K.leases, s.id)
  call('ZADD', K.ready, score, s.id)
  call('HSET', K.sample .. s.id, 'state', 'ready')
end

local function close(group, size)
  local states = {}
  for from = 0, size - 1, 1000 do
    local indices = {}
    for i = from, math.min(from + 999, size - 1) do
      indices[#indices + 1] = i
    end
    for _, state in ipairs(call('HMGET', K.group .. group, unpack(indices))) do
      states[#states + 1] = state
    end
  end
  call('XADD', K.results, '*', 'group', group, 'size', size, 'states', table.concat(states, ','))
  count('groups_closed', 1)
end

-- The only way into a terminal state. `keep_token` lets the holder repeat its call.
local function terminate(s, state, reason, err, keep_token)
  call('ZREM', K.ready, s.id)
  call('ZREM', K.leases, s.id)
  call('HSET', K.sample .. s.id, 'state', state, 'finish_reason', reason, 'error', err,
    'finished_at', text(now()))
  if not keep_token then
    call('HDEL', K.sample .. s.id, 'lease_token')
  end
  count(state, 1)
  if state == 'dead' then
    call('ZADD', K.dead, now(), s.id)
  end
  call('HSET', K.group .. s.group, s.index, state)
  local ended = call('HINCRBY', K.group .. s.group, 'ended', 1)
  local size = tonumber(call('HGET', K.group .. s.group, 'size'))
  if ended == size then
    close(s.group, size)
  end
end

-- forget the response: the sample starts again from its prompt
local function reset(s)
  count('wasted_tokens', s.tokens)
  call('DEL', K.chunks .. s.id)
  call('HSET', K.sample .. s.id, 'tokens', 0, 'version_first', -1, 'version_last', -1)
  s.tokens = 0
  s.version_first = -1
end

-- 'fresh', or what its policy made of a sample whose first token is too old: 'restarted', 'stale'
local function judge_staleness(s, current, keep_token)
  local g = call('HMGET', K.group .. s.group, 'max_staleness', 'staleness_policy')
  local limit = tonumber(g[1])
  if g[2] == 'allow' or not limit or s.version_first < 0
      or current - s.version_first <= limit then
    return 'fresh'
  end
  local bucket = math.max(0, math.ceil(math.log(math.max(1, s.tokens)) / math.log(2)))
  if g[2] == 'restart' and s.restarts < 2 then
    count('restarted_le_' .. text(2 ^ bucket), 1)
    reset(s)
    s.restarts = call('HINCRBY', K.sample .. s.id, 'restarts', 1)
    return 'restarted'
  end
  count('stale_le_' .. text(2 ^ bucket), 1)
  terminate(s, 'stale', 'stale', 'first token ' .. text(current - s.version_first)
    .. ' versions old, allowed are ' .. text(limit), keep_token)
  return 'stale'
end

-- Its worker or engine died. Its next holder holds few other suspects, and after a second
-- crash none, so that a poison sample is found out without its neighbours being given up.
local function crashed(s, max_crashes, err)
  s.crashes = call('HINCRBY', K.sample .. s.id, 'crashes', 1)
  call('HDEL', K.sample .. s.id, 'lease_token')
  call('HSET', K.sample .. s.id, 'error', err)
  count('crashes', 1)
  if s.crashes >= max_crashes then
    terminate(s, 'dead', 'error', 'its worker died ' .. text(s.crashes) .. ' times; last: ' .. err)
    return true
  end
  make_ready(s)
  return false
end
