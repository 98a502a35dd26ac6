"""Text similarity metrics of published data sets, from 0 to 1."""

import difflib
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

_CHINESE_PUNCTUATION = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢"
    "｣､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."
)
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ALL_PUNCTUATION = str.maketrans("", "", string.punctuation + _CHINESE_PUNCTUATION)


def english_words(text: str) -> list[str]:
    """Returns lower-case words without punctuation and articles (normalization of SQuAD)."""
    return re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_PUNCTUATION)).split()


def chinese_normalised(text: str) -> str:
    """Returns lower-case text without punctuation and white space."""
    return "".join(text.lower().translate(_ALL_PUNCTUATION).split())


def overlap_f1(answer: Sequence[str], reference: Sequence[str]) -> float:
    """F1 of the words that both texts contain, counted with multiplicity."""
    shared = sum((Counter(answer) & Counter(reference)).values())
    return 2 * shared / (len(answer) + len(reference)) if shared else 0.0


def words_f1(answer: str, reference: str) -> float:
    """F1 of English words."""
    return overlap_f1(english_words(answer), english_words(reference))


def characters_f1(answer: str, reference: str) -> float:
    """F1 of Chinese characters."""
    return overlap_f1(chinese_normalised(answer), chinese_normalised(reference))


def best(measure: Callable[[str, str], float], answer: str, references: Sequence[str]) -> float:
    """Returns the maximum over the references."""
    return max((measure(answer, reference) for reference in references), default=0.0)


def share_of_numbers(answer: str, number: str) -> float:
    """Returns the fraction of the numbers in an answer that are right."""
    found = re.findall(r"\d+", answer)
    return found.count(number) / len(found) if found else 0.0


def first_number(answer: str) -> str:
    """Returns the first run of digits; empty if there is none."""
    found = re.search("[0-9]+", answer)
    return found.group() if found else ""


def edit_similarity(answer: str, reference: str) -> float:
    """Ratio of matching characters, rounded to percent as in fuzzywuzzy."""
    ratio = difflib.SequenceMatcher(None, answer, reference).ratio()
    return int(round(100 * ratio)) / 100
