-- Shared by every script, after the names that scripts.py makes of its header:
-- K.<key name>, A.<scalar argument>, ITEMS (how many), item(i) -> the fields of item i.
-- Redis does not roll back: arguments are checked before the first write. A call of redis.call
-- costs about a microsecond, so what a script changes of samples, leases, groups and counters is
-- gathered, and `settle`, which runs behind every script, writes it in few calls. What is read
-- before is as it was, except through `sample` and `group`.

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

local clock
local function now()
  if not clock then
    local t = call('TIME')
    clock = t[1] * 1000 + math.floor(t[2] / 1000)
  end
  return clock
end

local clock_text
local function now_text()
  clock_text = clock_text or text(now())
  return clock_text
end

-- `write` gets a list of any length in pieces that `unpack` can take; pairs stay together
local function in_pieces(list, write)
  for from = 1, #list, 1000 do
    write(unpack(list, from, math.min(from + 999, #list)))
  end
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

-- What `settle` writes. Each list is found by the name of its key, or with a sample, so that a
-- script which gathers nothing needs no keys for it.
local counters, added, removed, renewed, changed, ending = {}, {}, {}, {}, {}, {}

local function of(lists, key)
  local list = lists[key]
  if not list then
    list = {}
    lists[key] = list
  end
  return list
end

local function append_pair(list, a, b)
  list[#list + 1] = a
  list[#list + 1] = b
end

local function count(name, by)
  local counts = of(counters, K.stats)
  counts[name] = (counts[name] or 0) + by
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

-- A worker is off the list, and so has no turn and no place in the line. Returns 1 if it was there.
local function strike(worker)
  call('ZREM', K.starting, worker)
  call('ZREM', K.turns, worker)
  call('ZREM', K.line, worker)
  return call('ZREM', K.workers, worker)
end

-- Those whose heart did not beat since.
local function bury(since)
  local dead = call('ZRANGEBYSCORE', K.workers, '-inf', '(' .. text(since))
  for _, worker in ipairs(dead) do
    strike(worker)
  end
end

-- Samples as they are for this call, each read once; false for what is not there. What is absent
-- in its hash is as it was at the start.
local samples = {}
local function sample(id)
  local s = samples[id]
  if s == nil then
    local key = K.sample .. id
    local v = call('HMGET', key, 'state', 'lease_token', 'tokens', 'attempts', 'version_first',
      'crashes', 'interruptions')
    local group, index = string.match(id, '^(.*)/(%d+)$')
    s = v[1] and {id = id, key = key, group = group, index = index, state = v[1],
      lease_token = v[2] ~= '' and v[2], tokens = tonumber(v[3] or 0),
      attempts = tonumber(v[4] or 0), version_first = tonumber(v[5] or -1),
      crashes = tonumber(v[6] or 0), interruptions = tonumber(v[7] or 0), changes = {}, n = 0}
    samples[id] = s
  end
  return s or nil
end

-- Change a field of a sample; `value` is a text, which is half the work of a number for Redis.
local function set(s, field, value)
  local n = s.n
  if n == 0 then
    changed[#changed + 1] = s
  end
  s.changes[n + 1] = field
  s.changes[n + 2] = value
  s.n = n + 2
end

local function set_number(s, field, value)
  s[field] = value
  set(s, field, text(value))
end

-- into a zset, and out of it
local function add(key, score, id)
  append_pair(of(added, key), score, id)
end

local function remove(key, id)
  local ids = of(removed, key)
  ids[#ids + 1] = id
end

-- Fields of a group's hash, each read once a call.
local groups = {}
local function group(id, ...)
  local g = groups[id]
  if not g then
    local names = {'size', 'ended', 'max_staleness', 'staleness_policy', 'reward', ...}
    g = {}
    for i, value in ipairs(call('HMGET', K.group .. id, unpack(names))) do
      g[names[i]] = value
    end
    groups[id] = g
  end
  return g
end

local function holds(s, token)
  return s and s.state == 'leased' and s.lease_token == token
end

-- the same call again, after its reply was lost: `state` is what the first one made of it
local function repeated(s, token, state)
  return s and s.state == state and s.lease_token == token
end

local function renew(id, expiry)
  append_pair(of(renewed, K.leases), expiry, id)
end

local function check_chunk(offset, n, version, chunk)
  if whole(offset, 'offset') < 0 or whole(n, 'count') < 1 or whole(version, 'version') < 0 then
    error('ROLLQ a chunk needs offset >= 0, count >= 1 and version >= 0', 0)
  end
  if #chunk > 4194304 then
    error('ROLLQ a chunk has at most 4 MiB, this one ' .. #chunk, 0)
  end
end

-- Tokens are stored once, and in order: a chunk that comes again, or too early, is not.
local function append(s, offset, n, version, chunk)
  if tonumber(offset) ~= s.tokens then
    return 0
  end
  s.list = K.chunks .. s.id
  s.pushed = s.pushed or {}
  s.pushed[#s.pushed + 1] = chunk
  if s.tokens == 0 then
    set_number(s, 'version_first', tonumber(version))
  end
  set(s, 'version_last', version)
  set_number(s, 'tokens', s.tokens + n)
  return tonumber(n)
end

local function set_state(s, state)
  s.state = state
  set(s, 'state', state)
end

local function make_ready(s)
  remove(K.leases, s.id)
  add(K.ready, text(call('HGET', s.key, 'seq') - s.crashes * SUSPECT), s.id)
  set_state(s, 'ready')
end

-- terminal states of a group's members, in order
local function states(group_id)
  local size = tonumber(group(group_id).size)
  local found = {}
  for from = 0, size - 1, 1000 do
    local indices = {}
    for i = from, math.min(from + 999, size - 1) do
      indices[#indices + 1] = i
    end
    for _, state in ipairs(call('HMGET', K.group .. group_id, unpack(indices))) do
      found[#found + 1] = state
    end
  end
  return table.concat(found, ','), size
end

-- put a closed group where trainers read
local function deliver(group_id)
  local members, size = states(group_id)
  call('ZREM', K.grading, group_id)
  local entry = call('XADD', K.results, '*', 'group', group_id, 'size', size, 'states', members)
  call('HSET', K.group .. group_id, 'entry', entry)
  count('groups_closed', 1)
end

-- Every member has ended. A group with a reward function waits for its grader first, unless no
-- member finished: then there is nothing to grade.
local function close(group_id)
  local reward = group(group_id).reward
  if reward and reward ~= '' and string.find((states(group_id)), 'finished', 1, true) then
    call('ZADD', K.grading, now(), group_id)
  else
    deliver(group_id)
  end
end

-- The only way into a terminal state. `keep_token` lets the holder repeat its call.
local function terminate(s, state, reason, err, keep_token)
  if s.state ~= 'leased' then
    remove(K.ready, s.id)
  end
  remove(K.leases, s.id)
  set_state(s, state)
  set(s, 'finish_reason', reason)
  set(s, 'error', err)
  set(s, 'finished_at', now_text())
  if not keep_token then
    set(s, 'lease_token', '')
  end
  count(state, 1)
  if state == 'dead' then
    add(K.dead, now_text(), s.id)
  end
  local g = group(s.group)
  if not g.ends then
    g.ends = {}
    ending[#ending + 1] = function()
      append_pair(g.ends, 'ended', g.ended)
      in_pieces(g.ends, function(...) call('HSET', K.group .. s.group, ...) end)
      g.ends = nil
      if g.ended == tonumber(g.size) then
        close(s.group)
      end
    end
  end
  g.ended = g.ended + 1
  append_pair(g.ends, s.index, state)
end

-- forget the response: the sample starts again from its prompt
local function reset(s)
  count('wasted_tokens', s.tokens)
  s.list, s.forgotten, s.pushed = K.chunks .. s.id, true, nil
  set_number(s, 'tokens', 0)
  set_number(s, 'version_first', -1)
  set(s, 'version_last', '-1')
end

-- 'fresh', or what its policy made of a sample whose first token is too old: 'restarted', 'stale'
local function judge_staleness(s, current, keep_token)
  local g = group(s.group)
  local limit = tonumber(g.max_staleness)
  if g.staleness_policy == 'allow' or not limit or s.version_first < 0
      or current - s.version_first <= limit then
    return 'fresh'
  end
  local bucket = math.max(0, math.ceil(math.log(math.max(1, s.tokens)) / math.log(2)))
  local restarts = tonumber(call('HGET', s.key, 'restarts') or 0)
  if g.staleness_policy == 'restart' and restarts < 2 then
    count('restarted_le_' .. text(2 ^ bucket), 1)
    reset(s)
    set(s, 'restarts', text(restarts + 1))
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
  set_number(s, 'crashes', s.crashes + 1)
  set(s, 'lease_token', '')
  set(s, 'error', err)
  count('crashes', 1)
  if s.crashes >= max_crashes then
    terminate(s, 'dead', 'error', 'its worker died ' .. text(s.crashes) .. ' times; last: ' .. err)
    return true
  end
  make_ready(s)
  return false
end

local KEPT = {'max_staleness', 'staleness_policy', 'reward', 'job', 'prompt_ids'}
local any_dead

-- A trainer has taken this group: nothing stays but its tombstone, and its dead to be looked at.
local function take(id, digest, size, consumer, tombstone_ms)
  any_dead = any_dead or call('ZCARD', K.dead)
  local gone = {K.group .. id}
  for index = 0, size - 1 do
    local sid = id .. '/' .. index
    if any_dead > 0 and call('ZSCORE', K.dead, sid) then
      for i, value in ipairs(call('HMGET', K.group .. id, unpack(KEPT))) do
        call('HSET', K.sample .. sid, KEPT[i], value or '')
      end
    else
      gone[#gone + 1] = K.sample .. sid
      gone[#gone + 1] = K.chunks .. sid
    end
  end
  in_pieces(gone, function(...) call('UNLINK', ...) end)
  call('SET', K.done .. id, digest .. ' ' .. consumer, 'PX', tombstone_ms)
  count('groups_acked', 1)
end

-- the consumer that a tombstone names
local function taker(tombstone)
  return string.match(tombstone, ' (.*)$')
end

-- no other attempt at grading follows: deliver the group with the grader's error
local function grading_failed(group_id, err)
  call('HSET', K.group .. group_id, 'reward_error', err)
  count('grading_failed', 1)
  deliver(group_id)
end

-- The last attempt that began never said how it ended: its process is gone, or stands still.
local function never_ended(group_id, attempts)
  local err = call('HGET', K.group .. group_id, 'reward_error') or ''
  if err ~= '' then
    err = '; before that: ' .. err
  end
  grading_failed(group_id, 'the grader was killed or took too long, ' .. text(attempts)
    .. ' attempts were made' .. err)
end

-- Write what was gathered; once, however often it is called.
local function settle()
  for _, s in ipairs(changed) do
    if s.forgotten then
      call('DEL', s.list)
    end
    if s.pushed then
      call('RPUSH', s.list, unpack(s.pushed))
    end
    call('HSET', s.key, unpack(s.changes))
    s.forgotten, s.pushed, s.changes, s.n = nil, nil, {}, 0
  end
  for key, ids in pairs(removed) do
    in_pieces(ids, function(...) call('ZREM', key, ...) end)
  end
  for key, scored in pairs(added) do
    in_pieces(scored, function(...) call('ZADD', key, ...) end)
  end
  for key, scored in pairs(renewed) do
    in_pieces(scored, function(...) call('ZADD', key, 'XX', ...) end)
  end
  for _, finish in ipairs(ending) do
    finish()
  end
  for key, counts in pairs(counters) do
    for name, by in pairs(counts) do
      if by ~= 0 then
        call('HINCRBY', key, name, by)
      end
    end
  end
  counters, added, removed, renewed, changed, ending = {}, {}, {}, {}, {}, {}
end
