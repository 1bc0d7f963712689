import pytest

from cachefs.errors import ConfigError
from cachefs.planning.eviction.policies import POLICIES, make_policy
from cachefs.planning.eviction.policies.minio import Minio
from cachefs.planning.sequences.plan import Plan


def test_admits_what_fits_and_never_gives_anything_up() -> None:
    policy = Minio()
    assert policy.can_admit(b"a", 10, 10)
    assert not policy.can_admit(b"a", 11, 10)
    policy.note_added(b"a", 10)
    assert not policy.choose_victims(1, ())


def test_it_wins_over_lru_under_shuffled_epochs() -> None:
    """Half the data fits: Minio hits for half of each epoch, LRU for 1 - ln 2 of it at best."""
    import random

    def hits(name: str) -> int:
        policy, inside, free, count, draw = make_policy(name, Plan()), set[bytes](), 500, 0, random.Random(0)
        keys = [b"%d" % number for number in range(1000)]
        for _ in range(5):
            draw.shuffle(keys)
            for key in keys:
                if key in inside:
                    count += 1
                    policy.note_accessed(key)
                    continue
                if not policy.can_admit(key, 1, free):
                    continue
                for victim in policy.choose_victims(1 - free, ()):
                    policy.note_removed(victim)
                    inside.remove(victim)
                    free += 1
                policy.note_added(key, 1)
                inside.add(key)
                free -= 1
        return count

    assert hits("minio") == 4 * 500
    assert hits("lru") < 4 * 250


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=", ".join(POLICIES)):
        make_policy("magic", Plan())
