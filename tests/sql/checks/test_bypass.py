"""bypass: superusers, BYPASSRLS, and who is a member of such a role; attributes are reached by SET ROLE, inherited or not."""

import pytest

from tests.doctor.conftest import Execute
from tests.sql.checks.conftest import Ask, MakeRole

pytestmark = pytest.mark.anyio


async def test_who_is_free_of_policies_and_by_whom(ask: Ask, boss: Execute, make_role: MakeRole) -> None:
    await make_role("b_bypasses", "BYPASSRLS")
    await make_role("a_super", "SUPERUSER")
    await make_role('c "odd" Member')
    await make_role("d_group")
    await make_role("e_of_the_group", "NOINHERIT")
    await make_role("f_of_both")
    await make_role("g_plain")
    await make_role("h_group_of_others")
    await boss(
        'GRANT b_bypasses TO "c ""odd"" Member", d_group, f_of_both, a_super',
        "GRANT a_super TO f_of_both",
        "GRANT d_group TO e_of_the_group",
        "GRANT h_group_of_others TO b_bypasses, g_plain",
    )
    roles = ["b_bypasses", "a_super", 'c "odd" Member', "e_of_the_group", "f_of_both", "g_plain", "h_group_of_others"]
    assert await ask("bypass", roles=roles) == [
        ("a_super", True, None),
        ("b_bypasses", False, None),
        ('c "odd" Member', False, "b_bypasses"),
        ("e_of_the_group", False, "b_bypasses"),
        ("f_of_both", False, "a_super"),
    ]
    assert await ask("bypass", roles=["g_plain", "aioqueue_worker", "aioqueue_client"]) == []
    assert await ask("bypass", roles=[]) == []
