-- For srun and salloc, whose environment the controller does not see, and for clusters without job_submit.lua: put it
-- beside slurm.conf on the machines where jobs are submitted. The hint file has to be there too for it to choose nodes.

-- cachefs.lua lies beside this file, wherever that is: Slurm gives its full path to Lua.
local place = debug.getinfo(1, "S").source:match("^@(.*/)") or "/etc/slurm/"
local loaded, cachefs = pcall(dofile, place .. "cachefs.lua")

function slurm_cli_setup_defaults(options, early_pass)
    return slurm.SUCCESS
end

function slurm_cli_pre_submit(options, pack_offset)
    if loaded and pack_offset == 0 then
        cachefs.cli_filter(options)
    end
    return slurm.SUCCESS
end

function slurm_cli_post_submit(offset, job_id, step_id)
    return slurm.SUCCESS
end
