from sirtaki.analysis.svg import Html, share_bar, table


def test_cells_are_escaped_unless_they_are_html() -> None:
    made = table(["<t>"], [["<b>"], [Html("<i>x</i>")]], text=(0,), last=["&"])
    assert "&lt;t&gt;" in made
    assert "<td>&lt;b&gt;</td>" in made
    assert "<td><i>x</i></td>" in made
    assert '<tr class="sum"><td>&amp;</td></tr>' in made


def test_columns_are_numbers_unless_they_are_told_to_be_text() -> None:
    assert table(["a", "b"], [["1", "2"]], text=(0,)).endswith('<tr><td>1</td><td class="number">2</td></tr></table>')


def test_a_bar_is_as_long_as_the_share_and_no_longer_than_the_whole() -> None:
    widths = [share_bar(share).partition("width:")[2].partition("px")[0] for share in (-1.0, 0.0, 0.5, 1.0, 7.0)]
    assert widths == ["0.0", "0.0", "80.0", "160.0", "160.0"]
