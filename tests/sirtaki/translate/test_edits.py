import libcst as cst

from sirtaki.translate.source import Edits, Source

SCRIPT = """\
# a comment
x = 1  # one

if x:
    save(x)
"""


def test_changes_are_made_and_the_rest_of_the_text_stays() -> None:
    source, edits = Source(SCRIPT), Edits()
    call = next(source.all(cst.Call))
    edits.wrap(call.args[0].value, "twice")
    edits.wrap(call.args[0].value, "twice")
    edits.put_into(source.statement(call), "if first")
    edits.before(source.statement(call), "begin()", "begin()")
    edits.after(next(source.all(cst.SimpleStatementLine)), "y = 2")
    assert edits.changes_in(call)
    assert (
        edits.applied(source.module)
        == """\
# a comment
x = 1  # one
y = 2

if x:
    begin()
    if first:
        save(twice(x))
"""
    )


def test_a_statement_can_go_and_a_name_stand_in_a_call() -> None:
    source, edits = Source("a = 1\nfor i in f(b):\n    pass\n"), Edits()
    edits.remove(next(source.all(cst.SimpleStatementLine)))
    edits.wrap(next(source.all(cst.Call)), "map(g, _)")
    assert edits.applied(source.module) == "for i in map(g, f(b)):\n    pass\n"


def test_notes_come_once() -> None:
    edits = Edits()
    edits.note(0, "so")
    edits.note(0, "so")
    edits.refuse(3, "no")
    assert (edits.notes, edits.obstacles) == ([(0, "so")], [(3, "no")])
