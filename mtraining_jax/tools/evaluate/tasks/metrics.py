"""Rules for scoring generated answers, from 0 to 1."""

import difflib
import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

_CHINESE_PUNCTUATION = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢"
    "｣､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."
)
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ALL_PUNCTUATION = str.maketrans("", "", string.punctuation + _CHINESE_PUNCTUATION)


def fraction_found(answer: str, references: Sequence[object]) -> float:
    """Fraction of references in an answer, ignoring case: RULER's `string_match_all`."""
    answer = _cleaned(answer)
    return sum(str(each).lower() in answer for each in references) / len(references)


def any_found(answer: str, references: Sequence[object]) -> float:
    """1 if any reference occurs in an answer, ignoring case: RULER's `string_match_part`."""
    answer = _cleaned(answer)
    return float(any(str(each).lower() in answer for each in references))


def _cleaned(answer: str) -> str:
    """Lower-case text without control characters; RULER's `postprocess_pred`."""
    return re.sub(r"[\x00-\x1f]", "\n", answer.strip()).strip().lower()


def best(measure: Callable[[str, str], float], answer: str, references: Iterable[str]) -> float:
    """Returns the maximum over the references."""
    return max((measure(answer, reference) for reference in references), default=0.0)


def overlap_f1(answer: Sequence[str], reference: Sequence[str]) -> float:
    """F1 of the words that both texts contain, counted with multiplicity."""
    shared = sum((Counter(answer) & Counter(reference)).values())
    return 2 * shared / (len(answer) + len(reference)) if shared else 0.0


def words_f1(answer: str, reference: str) -> float:
    """F1 of English words without punctuation and articles (normalization of SQuAD)."""

    def words(text: str) -> list[str]:
        return re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_PUNCTUATION)).split()

    return overlap_f1(words(answer), words(reference))


def characters_f1(answer: str, reference: str) -> float:
    """F1 of Chinese characters."""
    return overlap_f1(normalized_chinese(answer), normalized_chinese(reference))


def normalized_chinese(text: str) -> str:
    """Returns lower-case text without punctuation and white space."""
    return "".join(text.lower().translate(_ALL_PUNCTUATION).split())


def fraction_of_numbers(answer: str, number: str) -> float:
    """Returns the fraction of the numbers in an answer that are right."""
    found = re.findall(r"\d+", answer)
    return found.count(number) / len(found) if found else 0.0


def edit_similarity(answer: str, reference: str) -> float:
    """Ratio of matching characters, rounded to percent as in fuzzywuzzy."""
    ratio = difflib.SequenceMatcher(None, answer, reference).ratio()
    return int(round(100 * ratio)) / 100
