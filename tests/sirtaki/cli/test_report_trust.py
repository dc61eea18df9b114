from fakes.trial_logs import JOB, MODEL, RESULT, predicted, svgs

from sirtaki.cli.report import render
from sirtaki.engine.tuning.trial_log import read_log


def test_a_credit_that_is_zero_for_all_is_said(log_of):
    flat = [{**record, "auc": {"grid": 0.0}} for record in JOB[:-1]]
    assert "None has found a setting that is clearly better" in render(read_log(log_of(*flat, RESULT)))
    assert "None has found" not in render(read_log(log_of(*JOB)))


def boxes_of(plot):
    """Opacity of the boxes of each row, by their tooltip's first word."""
    found = {}
    for element in plot.iter():
        if element.tag.endswith("rect"):
            found.setdefault(element[0].text.split(":")[0], []).append(float(element.get("fill-opacity")))
    return found


def test_the_credit_of_each_arm_is_drawn_as_the_job_wrote_it(log_of):
    rows = boxes_of(svgs(render(read_log(log_of(*JOB))))[2])
    assert len(set(rows["grid"])) == 1  # stays at 0.5
    assert rows["pbt"] == sorted(rows["pbt"], reverse=True)
    assert len(set(rows["pbt"])) == 4  # falls with each trial


def test_planners_have_no_row_of_credit_while_their_model_is_not_believed(log_of):
    credits = {"auc": {"grid": 0.5, "libra": 0.5}}
    records = [predicted({**record, **credits}, 0.1, believed=record is JOB[0]) for record in JOB[:3]]
    rows = boxes_of(svgs(render(read_log(log_of(*records))))[2])
    assert (len(rows["grid"]), len(rows["libra"])) == (3, 1)


def test_every_prediction_is_drawn_against_what_was_measured(log_of):
    records = [predicted(JOB[0], 0.21), predicted(JOB[1], 0.05), JOB[2], RESULT]
    page = render(read_log(log_of(*records)))
    assert "<h2>Predicted and measured</h2>" in page
    titles = [element.text for element in svgs(page)[3].iter() if element.tag.endswith("title")]
    assert [title.split(":")[0] for title in titles] == [
        "predicted 210 ms, measured 200 ms",
        "predicted 50 ms, measured 100 ms",
    ]
    assert "predicted to be faster in 90 % of the cases" in page
    assert "In the median, measured times were 1.5 times the predicted ones." in page
    assert "were not asked any more" not in page


def test_a_model_that_was_doubted_is_said_to_be(log_of):
    records = [predicted(JOB[0], 0.21), predicted(JOB[1], 0.5, -0.6, believed=False), RESULT]
    page = render(read_log(log_of(*records)))
    assert "predicted to be faster in 20 % of the cases" in page
    assert "From iteration 6 on it was below 70 %, so planners were not asked any more." in page


def test_without_predictions_nothing_is_said_of_them(log_of):
    assert "Predicted and measured" not in render(read_log(log_of(MODEL, *JOB)))


def test_a_log_without_credits_has_no_plot_of_them(log_of):
    plain = [{key: value for key, value in record.items() if key != "auc"} for record in JOB]
    page = render(read_log(log_of(*plain)))
    assert "trusted" not in page
    assert len(svgs(page)) == 2


def test_a_trial_is_a_dot_in_its_arms_row_and_a_repetition_in_the_finals_is_none(log_of):
    def dots(*records):
        return sum(element.tag.endswith("circle") for element in svgs(render(read_log(log_of(*records))))[2].iter())

    finals = {**JOB[1], "iteration": 18, "purpose": "finals"}
    assert dots(*JOB) == dots(*JOB[:-1], finals, RESULT) == 2  # the third has failed
