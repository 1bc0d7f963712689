from cachefs_scheduler.slurm.node_records import MAX_NODES, FeatureChange, SlurmNode, feature_changes, parse_nodes

SAID = """\
n1|main*|mixed|4|gpu,cachefs_a_some|gpu,cachefs_a_some
n2|main*|idle~|8+|(null)|
n2|debug|idle~|8+|(null)|
n3|debug|drained|4|gpu,cachefs_node|gpu
n4|debug|idle*|4||
strange
"""


def node(name: str, *features: str) -> SlurmNode:
    return SlurmNode(name, ("main",), usable=True, cpus=4, available=features, active=features)


def test_what_sinfo_says() -> None:
    found = parse_nodes(SAID)
    assert found.default == "main"
    assert [(each.name, each.partitions, each.usable, each.cpus) for each in found.nodes] == [
        ("n1", ("main",), True, 4),
        ("n2", ("main", "debug"), True, 8),
        ("n3", ("debug",), False, 4),
        ("n4", ("debug",), False, 4),
    ]
    assert found.nodes[0].active == ("gpu", "cachefs_a_some")
    assert found.nodes[2].available == ("gpu", "cachefs_node")


def test_only_ours_change_and_others_keep_their_order() -> None:
    known = SlurmNode("n1", ("main",), True, 4, ("z", "cachefs_a_some", "cachefs_node", "a"), ("z", "cachefs_a_some"))
    assert feature_changes([known], {"n1": ["cachefs_b_top1", "cachefs_b_some"]}) == [
        FeatureChange(
            ("n1",), ("z", "cachefs_node", "a", "cachefs_b_some", "cachefs_b_top1"),
            ("z", "cachefs_b_some", "cachefs_b_top1"),
        )
    ]  # fmt: skip


def test_nothing_to_do_is_no_call() -> None:
    assert feature_changes([node("n1", "cachefs_a_some", "x"), node("n2")], {"n1": ["cachefs_a_some"]}) == []


def test_what_is_lost_of_one_of_the_two_is_set_again() -> None:
    known = SlurmNode("n1", ("main",), True, 4, ("cachefs_a_some",), ())
    assert feature_changes([known], {"n1": ["cachefs_a_some"]})[0].active == ("cachefs_a_some",)


def test_nodes_that_become_alike_share_a_call() -> None:
    nodes = [node(f"n{number}", "x") for number in range(MAX_NODES + 1)]
    found = feature_changes(nodes, {each.name: ["cachefs_a_some"] for each in nodes})
    assert [len(change.nodes) for change in found] == [MAX_NODES, 1]
