import gzip
import logging
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert_jax.data.preparation.pipeline import PrepareOptions
from bert_jax.errors import InputError
from bert_jax.text import sentences
from bert_jax.text.sentences import warn_of_language


def test_abbreviations_do_not_end_a_sentence_and_line_ends_do():
    text = "Dr. Smith went to Washington. He came back!\nA heading without a full stop\n\n  Was it raining? Yes.  "
    assert sentences.split(text) == [
        "Dr. Smith went to Washington.",
        "He came back!",
        "A heading without a full stop",
        "Was it raining?",
        "Yes.",
    ]


def test_a_long_quotation_is_split_into_its_sentences():
    speech = "This is what he said to her. " * 30
    expected = ["He said:", *["This is what he said to her."] * 30, "She left."]
    for opening, closing in ('""', "“”", "‘’", "«»", "()"):
        found = sentences.split(f"He said: {opening}{speech.strip()}{closing} She left.")
        assert [sentence.strip(opening + closing + " ") for sentence in " ".join(found).split(": ", 1)[0:1]] == [
            "He said"
        ]
        assert len(found) == 31
        assert found[1:-2] == expected[2:-2]
        assert found[-2:] == [f"This is what he said to her.{closing}", "She left."]


@pytest.mark.parametrize("text", ["lorem ipsum dolor " * 500, "語" * 5000, "x" * 20_000, "한국어 문장 " * 800])
def test_text_without_full_stops_is_split_between_words(text):
    found = sentences.split(text)
    assert max(len(part.encode()) for part in found) <= 512
    assert min(len(part.encode()) for part in found[:-1]) > 200
    assert "".join(found).replace(" ", "") == text.replace(" ", "")
    assert {word for part in found for word in part.split()} == set(text.split()) or " " not in text


@pytest.mark.parametrize("quote", "‘“«„‹「\"'(")
def test_unclosed_quotations_take_linear_time(quote, monkeypatch):
    segment, sizes = sentences.sentencex.segment, []
    monkeypatch.setattr(
        sentences.sentencex, "segment", lambda language, text: sizes.append(len(text)) or segment(language, text)
    )
    text = f"{quote}He said. " * 20_000
    assert sum(map(len, sentences.split(text))) > 0.85 * len(text)
    assert max(sizes) < 10_000
    assert sum(sizes) < 4 * len(text)


def test_nothing_of_a_book_in_one_line_is_lost(data_dir):
    text = gzip.decompress((data_dir / "corpus/books/khalil-gibran-the-madman.txt.gz").read_bytes()).decode()
    by_line, at_once = sentences.split(text), sentences.split(text.replace("\n", " "))
    assert "".join("".join(at_once).split()) == "".join(text.split())
    assert max(len(sentence.encode()) for sentence in at_once) <= 512
    assert len(at_once) > 0.8 * len(by_line)


@given(st.text(alphabet="ab. !?\"'“”‘’«»()「」語。\n", max_size=400), st.sampled_from(["en", "ko", "ja", "km"]))
def test_no_character_is_lost(text, language):
    with mock.patch.multiple(sentences, _BLOCK=40, _LONGEST=20):
        found = sentences.split(text, language)
    assert "".join("".join(found).split()) == "".join(text.split())


@pytest.mark.parametrize("space", ["\u00a0", "\u2003", "\u2028", "\u3000"])
def test_wide_spaces_after_an_initial(space, caplog):
    """sentencex panics on these spaces."""
    with caplog.at_level(logging.WARNING):
        assert sentences.split(f"B. J.{space}Smith wrote. It{space}sold.") == ["B. J. Smith wrote.", "It sold."]
    assert not caplog.records


def test_a_panic_costs_one_line(monkeypatch, caplog):
    class PanicException(BaseException):
        pass

    def segment(language: str, line: str) -> list[str]:
        if "bad" in line:
            raise PanicException("byte index 8 is not a char boundary")
        return line.split("|")

    monkeypatch.setattr(sentences.sentencex, "segment", segment)
    with caplog.at_level(logging.WARNING):
        assert sentences.split("a|b\nbad|line\nc|d") == ["a", "b", "bad|line", "c", "d"]
    assert len(caplog.records) == 1
    monkeypatch.setattr(sentences.sentencex, "segment", lambda language, line: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        sentences.split("a")


def test_lines_are_taken_as_they_are():
    assert sentences.lines(" One. Two.\n\nThree\u2028four\r\n") == ["One. Two.", "Three\u2028four"]


SENTENCES = {  # three or four sentences of everyday words, by language; abbreviations and quotations where it has them
    "am": ["ወደ ቤት እየሄድኩ ነው።", "የት ነህ?", "እሱ መጣ፡፡", "እንሂድ።"],
    "ar": ["أنا ذاهب إلى البيت.", "أين أنت؟", "الطقس جميل اليوم!"],
    "as": ["মই ঘৰলৈ গৈ আছোঁ।", "তুমি ক'ত আছা?", "আজি বতৰ ভাল।"],
    "bg": ["Отивам вкъщи.", "Къде си?", "Днес времето е хубаво."],
    "bn": ["আমি বাড়ি যাচ্ছি।", "তুমি কোথায়?", "আজ আবহাওয়া ভালো।"],
    "bo": ["ང་ནང་ལ་འགྲོ་གི་ཡོད།", "ཁྱེད་རང་ག་པར་ཡོད།", "དེ་རིང་གནམ་གཤིས་ཡག་པོ་འདུག"],
    "de": ["Ich gehe z. B. am 3. Mai nach Hause.", "Wo bist du?", "Dr. Klein kommt."],
    "el": ["Πάω σπίτι.", "Πού είσαι;", "Σήμερα ο καιρός είναι καλός."],
    "es": ["Voy a casa.", "¿Dónde estás?", "El Sr. García llegó."],
    "fa": ["من به خانه می‌روم.", "تو کجایی؟", "امروز هوا خوب است."],
    "fr": ["Je rentre chez moi.", "Où es-tu ?", "Il fait beau."],
    "gu": ["હું ઘરે જાઉં છું.", "તમે ક્યાં છો?", "આજે હવામાન સારું છે."],
    "he": ["אני הולך הביתה.", "איפה אתה?", "היום מזג האוויר טוב."],
    "hi": ["मैं घर जा रहा हूँ।", "तुम कहाँ हो?", "वह आया!", "आज मौसम अच्छा है।"],
    "hy": ["Ես գնում եմ տուն։", "Դու որտե՞ղ ես։", "Այսօր եղանակը լավ է։"],
    "ja": ["今日は天気がいいです。", "公園に行きますか？", "彼は「嬉しい。」と言った。", "「雨だ！」", "とても寒い。"],
    "ka": ["მე სახლში მივდივარ.", "სად ხარ?", "დღეს კარგი ამინდია."],
    "kk": ["Мен үйге барамын.", "Сен қайдасың?", "Бүгін ауа райы жақсы."],
    "km": ["ខ្ញុំទៅផ្ទះ។", "អ្នកនៅឯណា?", "យើងទិញត្រី បន្លែ។ល។", "ថ្ងៃនេះអាកាសធាតុល្អ។"],
    "kn": ["ನಾನು ಮನೆಗೆ ಹೋಗುತ್ತಿದ್ದೇನೆ.", "ನೀನು ಎಲ್ಲಿದ್ದೀಯ?", "ಇಂದು ಹವಾಮಾನ ಚೆನ್ನಾಗಿದೆ."],
    "ko": ["나는 집에 간다.", "너는 어디에 있니?", '그는 "기쁘다."라고 말했다.', "그는 “간다.”", "오늘은 춥다."],
    "lo": ["ຂ້ອຍໄປບ້ານ.", "ເຈົ້າຢູ່ໃສ?", "ມື້ນີ້ອາກາດດີ."],
    "ml": ["ഞാൻ വീട്ടിലേക്ക് പോകുന്നു.", "നീ എവിടെയാണ്?", "ഇന്ന് കാലാവസ്ഥ നല്ലതാണ്."],
    "mr": ["मी घरी जात आहे.", "तू कुठे आहेस?", "आज हवा चांगली आहे."],
    "my": ["ကျွန်တော် အိမ်ပြန်မယ်။", "မင်း ဘယ်မှာလဲ။", "ဒီနေ့ ရာသီဥတု ကောင်းတယ်။"],
    "ne": ["म घर जाँदैछु।", "तिमी कहाँ छौ?", "आज मौसम राम्रो छ।"],
    "or": ["ମୁଁ ଘରକୁ ଯାଉଛି।", "ତୁମେ କେଉଁଠି?", "ଆଜି ପାଗ ଭଲ ଅଛି।"],
    "pa": ["ਮੈਂ ਘਰ ਜਾ ਰਿਹਾ ਹਾਂ।", "ਤੁਸੀਂ ਕਿੱਥੇ ਹੋ?", "ਅੱਜ ਮੌਸਮ ਚੰਗਾ ਹੈ।"],
    "ru": ["Я иду домой.", "Где ты?", "А. С. Пушкин родился в 1799 г. в Москве."],
    "sa": ["अहं गृहं गच्छामि।", "त्वं कुत्र असि?", "सः आगतः॥", "रामः वनं गच्छति।"],
    "si": ["මම ගෙදර යනවා.", "ඔයා කොහෙද?", "අද කාලගුණය හොඳයි."],
    "ta": ["நான் வீட்டிற்கு செல்கிறேன்.", "நீ எங்கே இருக்கிறாய்?", "இன்று வானிலை நன்றாக உள்ளது."],
    "te": ["నేను ఇంటికి వెళ్తున్నాను.", "నువ్వు ఎక్కడ ఉన్నావు?", "ఈరోజు వాతావరణం బాగుంది."],
    "ti": ["ናብ ገዛ ይኸይድ ኣለኹ።", "ኣበይ ኣለኻ?", "ሎሚ ጽቡቕ ኣሎ።"],
    "tr": ["Eve gidiyorum.", "Neredesin?", "Bugün hava güzel."],
    "uk": ["Я йду додому.", "Де ти?", "Сьогодні гарна погода."],
    "ur": ["میں گھر جا رہا ہوں۔", "تم کہاں ہو؟", "آج موسم اچھا ہے۔"],
    "vi": ["Tôi đi về nhà.", "Bạn ở đâu?", "Hôm nay trời đẹp."],
    "zh": ["今天天气很好。", "我们去公园吧！", "你想去吗？", "他说：“我很高兴。”", "然后他走了。"],
}


@pytest.mark.parametrize("language", SENTENCES)
def test_full_stops_of_each_language(language):
    assert sentences.split(" ".join(SENTENCES[language]), language) == SENTENCES[language]


@pytest.mark.parametrize("language", ["zh", "ja", "km"])
def test_full_stops_without_a_space_after_them(language):
    assert sentences.split("".join(SENTENCES[language]), language) == SENTENCES[language]


# --- Languages ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["korean", "DE", "en_US", "", "e", "français"])
def test_what_is_no_code_is_refused_with_those_that_have_rules(given):
    with pytest.raises(InputError, match=rf"language='{given}': .*\bde el en es\b"):
        PrepareOptions(language=given)


@pytest.mark.parametrize("code", ["en", "de", "ko", "zh", "zh-hant", "pt-br", "sv", "gsw", "xx", "cbk-zam"])
def test_codes_are_taken(code):
    assert PrepareOptions(language=code).language == code
    assert sentences.split("One. Two.", code)


@pytest.mark.parametrize(
    ("code", "words"), [("de", []), ("sv", ["rules"]), ("az-latn", ["rules"]), ("th", ["--sentences lines"])]
)
def test_warnings(code, words, caplog):
    warn_of_language(code)
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * len(words)
    assert all(word in message for word, message in zip(words, caplog.messages, strict=True))
