-- enqueue: take in whole groups, once an id.
-- KEYS: ready sample chunks group done dead stats config workers updates
-- ARGV: | group size digest max_tokens prompt_tokens max_staleness staleness_policy restart reward traceparent job prompt_ids
-- REPLY: a word a group: new, same (already here), done (already delivered), conflict, full
-- INVARIANT: all members of a group become ready, or none.
local limit = config('max_ready')[1]
for i = 1, ITEMS do
  local group, size, _, max_tokens, prompt_tokens, max_staleness, staleness_policy, restart = item(i)
  size = whole(size, 'size')
  if size < 1 or size > 4096 then
    error('ROLLQ a group has 1 to 4096 samples, not ' .. size, 0)
  end
  if size > limit then
    error('ROLLQ group ' .. group .. ' has ' .. size .. ' samples, max_ready is ' .. limit, 0)
  end
  whole(max_tokens, 'max_tokens')
  whole(prompt_tokens, 'prompt_tokens')
  if max_staleness ~= '' then
    whole(max_staleness, 'max_staleness')
  end
  if staleness_policy ~= 'allow' and staleness_policy ~= 'restart' and staleness_policy ~= 'drop' then
    error('ROLLQ staleness_policy must be allow, restart or drop, not ' .. staleness_policy, 0)
  end
  if restart ~= '0' and restart ~= '1' then
    error('ROLLQ restart must be 0 or 1, not ' .. restart, 0)
  end
end

local dead = call('ZCARD', K.dead)
local before = call('ZCARD', K.ready)
local waiting = before
local seq = tonumber(call('HGET', K.stats, 'samples_enqueued') or 0)
local function create(group, size, fields)
  count('samples_enqueued', size)
  count('groups_enqueued', 1)
  waiting = waiting + size
  call('HSET', K.group .. group, 'size', size, 'ended', 0, 'started', 0, unpack(fields))
  for index = 0, size - 1 do
    local id = group .. '/' .. index
    seq = seq + 1
    if dead > 0 and call('ZREM', K.dead, id) == 1 then
      call('UNLINK', K.sample .. id, K.chunks .. id)
    end
    local place = text(seq)
    call('HSET', K.sample .. id, 'state', 'ready', 'seq', place, 'enqueued_at', now_text())
    add(K.ready, place, id)
  end
end

local answers = {}
for i = 1, ITEMS do
  local group, size, digest, max_tokens, prompt_tokens, max_staleness, staleness_policy, restart,
    reward, traceparent, job, prompt_ids = item(i)
  size = tonumber(size)
  local here = call('HGET', K.group .. group, 'digest')
  local taken = not here and call('GET', K.done .. group)
  if here then
    answers[i] = here == digest and 'same' or 'conflict'
  elseif taken then
    answers[i] = string.sub(taken, 1, #digest) == digest and 'done' or 'conflict'
  elseif waiting + size > limit then
    answers[i] = 'full'
  else
    create(group, size, {'digest', digest, 'max_tokens', max_tokens, 'prompt_tokens', prompt_tokens,
      'max_staleness', max_staleness, 'staleness_policy', staleness_policy, 'restart', restart,
      'reward', reward, 'traceparent', traceparent, 'job', job, 'prompt_ids', prompt_ids})
    answers[i] = 'new'
  end
end
-- Who found nothing ready looks again within half a second; a hint wakes it now. Of many
-- workers some look at any moment, and to wake them all would be a burst of empty claims.
local MANY = 64
local workers = call('ZCARD', K.workers)
if before == 0 and waiting > 0 and workers > 0 and workers <= MANY then
  call('XADD', K.updates, 'MAXLEN', '~', 1000, '*', 'ready', 'some')
end
return answers
