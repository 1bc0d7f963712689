-- For clusters that have no job_submit.lua yet: put it beside slurm.conf. Where there is one, put the first lines and the
-- call of cachefs.job_submit into it.

-- cachefs.lua lies beside this file, wherever that is: Slurm gives its full path to Lua.
local place = debug.getinfo(1, "S").source:match("^@(.*/)") or "/etc/slurm/"
local loaded, cachefs = pcall(dofile, place .. "cachefs.lua")
if not loaded then
    slurm.log_error("cachefs: no hints for jobs: %s", tostring(cachefs))
end

function slurm_job_submit(job_desc, part_list, submit_uid)
    if loaded then
        cachefs.job_submit(job_desc)
    end
    return slurm.SUCCESS
end

function slurm_job_modify(job_desc, job_rec, part_list, modify_uid)
    return slurm.SUCCESS
end
