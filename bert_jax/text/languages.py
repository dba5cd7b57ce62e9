"""Language codes accepted by `--language`: the ISO 639 codes of `sentencex`.

sentencex accepts any string and splits text of an unknown language as English. The codes with rules of their own are
those of its `language_factory`. Further codes, with a script, a region or three letters, fall back to one of those. See
https://github.com/wikimedia/sentencex, src/languages/fallbacks.yaml.
"""

import difflib
import logging

from bert_jax.errors import InputError

log = logging.getLogger(__name__)

_OWN_RULES = "am ar bg bn ca da de el en es fi fr gu hi hy it ja kk kn ml mr my nl pa pl pt ru sk ta te uk"
OWN_RULES = frozenset(_OWN_RULES.split())
"""The languages that sentencex has rules for."""

WITHOUT_SENTENCE_MARKS = frozenset(("th", "lo"))
"""Languages whose texts have spaces between clauses and sentences, and mostly no mark at the end of a sentence."""

_ISO_639_1 = """
    aa Afar; ab Abkhazian; ae Avestan; af Afrikaans; ak Akan; am Amharic; an Aragonese; ar Arabic; as Assamese;
    av Avaric; ay Aymara; az Azerbaijani; ba Bashkir; be Belarusian; bg Bulgarian; bi Bislama; bm Bambara;
    bn Bengali/Bangla; bo Tibetan; br Breton; bs Bosnian/Bosanski; ca Catalan/Català; ce Chechen; ch Chamorro;
    co Corsican; cr Cree; cs Czech/Čeština; cu Church Slavic; cv Chuvash; cy Welsh/Cymraeg; da Danish/Dansk;
    de German/Deutsch; dv Divehi; dz Dzongkha; ee Ewe; el Greek; en English; eo Esperanto;
    es Spanish/Español/Castellano; et Estonian/Eesti; eu Basque/Euskara; fa Persian/Farsi; ff Fulah;
    fi Finnish/Suomi; fj Fijian; fo Faroese; fr French/Français; fy Western Frisian/Frysk; ga Irish/Gaeilge;
    gd Scottish Gaelic/Gàidhlig; gl Galician/Galego; gn Guarani; gu Gujarati; gv Manx; ha Hausa; he Hebrew;
    hi Hindi; ho Hiri Motu; hr Croatian/Hrvatski; ht Haitian; hu Hungarian/Magyar; hy Armenian; hz Herero;
    ia Interlingua; id Indonesian/Bahasa Indonesia; ie Interlingue; ig Igbo; ii Sichuan Yi; ik Inupiaq; io Ido;
    is Icelandic/Íslenska; it Italian/Italiano; iu Inuktitut; ja Japanese/Nihongo/jp; jv Javanese; ka Georgian;
    kg Kongo; ki Kikuyu; kj Kuanyama; kk Kazakh; kl Kalaallisut; km Khmer; kn Kannada; ko Korean/Hangugeo/kr;
    kr Kanuri; ks Kashmiri; ku Kurdish; kv Komi; kw Cornish; ky Kirghiz/Kyrgyz; la Latin; lb Luxembourgish;
    lg Ganda; li Limburgan; ln Lingala; lo Lao; lt Lithuanian; lu Luba-Katanga; lv Latvian; mg Malagasy;
    mh Marshallese; mi Maori; mk Macedonian; ml Malayalam; mn Mongolian; mr Marathi; ms Malay/Bahasa Melayu;
    mt Maltese; my Burmese/Myanmar; na Nauru; nb Norwegian Bokmål/Bokmål; nd North Ndebele; ne Nepali; ng Ndonga;
    nl Dutch/Nederlands/Flemish; nn Norwegian Nynorsk/Nynorsk; no Norwegian/Norsk; nr South Ndebele; nv Navajo;
    ny Chichewa; oc Occitan; oj Ojibwa; om Oromo; or Odia/Oriya; os Ossetian; pa Punjabi/Panjabi; pi Pali;
    pl Polish/Polski; ps Pashto; pt Portuguese/Português; qu Quechua; rm Romansh; rn Rundi;
    ro Romanian/Română; ru Russian/Russkiy; rw Kinyarwanda; sa Sanskrit; sc Sardinian; sd Sindhi;
    se Northern Sami; sg Sango; si Sinhala; sk Slovak/Slovenčina; sl Slovenian/Slovenščina; sm Samoan; sn Shona;
    so Somali; sq Albanian/Shqip; sr Serbian/Srpski; ss Swati; st Southern Sotho; su Sundanese;
    sv Swedish/Svenska; sw Swahili/Kiswahili; ta Tamil; te Telugu; tg Tajik; th Thai; ti Tigrinya; tk Turkmen;
    tl Tagalog; tn Tswana; to Tonga; tr Turkish/Türkçe; ts Tsonga; tt Tatar; tw Twi; ty Tahitian; ug Uighur;
    uk Ukrainian; ur Urdu; uz Uzbek; ve Venda; vi Vietnamese/Tiếng Việt; vo Volapük; wa Walloon; wo Wolof;
    xh Xhosa; yi Yiddish; yo Yoruba; za Zhuang; zh Chinese/Mandarin/cn; zu Zulu
"""
_NAMES = {
    code: tuple(names.split("/"))
    for code, _, names in (" ".join(entry.split()).partition(" ") for entry in _ISO_639_1.split(";"))
}
_FALLBACKS = """
    abs ace ady aeb aeb-arab aln alt ami anp arn arq ary arz ast atj avk awa azb ban bar bbc bcc be-tarask bgn bh bjn
    bpy bqi btm bug bxr cbk-zam cdo crh csb de-at de-ch de-formal dsb dtp dty egl eml es-formal ext fit frc frp frr fur
    gag gan gcr glk gom gor gsw guc hak hif hrx hsb hu-formal hyw inh jut kaa kab kbd kbp khw kiu kjp kk-arab kk-cn
    kk-kz kk-latn kk-tr ko-kp koi krc krl ksh ku-arab kum lad lbe lez lij liv lki lld lmo lrc ltg luz lzh lzz mad mai
    map-bms mdf mhr min mnw mo mrj ms-arab mwl myv mzn nah nan nap nds nds-nl nia nl-informal nrm olo pcd pdc pdt pfl
    pms pnt pt-br qug rgn rmy roa-tara rue rup ruq sah scn sdc sdh ses sgs sh shi shy skr sli smn srn stq sty szl szy
    tay tcy tet trv tyv udm vec vep vls vmf vot vro wuu xal xmf zea zgh zh-cn zh-hans zh-hant zh-hk zh-mo zh-my zh-sg
    zh-tw
"""
_FURTHER = frozenset(_FALLBACKS.split())


def check_language(code: str) -> None:
    """Validates a language code.

    Raises:
      InputError: unknown code; suggests the closest one and lists those with rules of their own.
    """
    if code in OWN_RULES or code in _NAMES or code in _FURTHER:
        return
    closest = _nearest(code)
    suggestion = f"; did you mean {closest} ({_NAMES[closest][0]})?" if closest in _NAMES else ""
    raise InputError(
        f"--language={code!r}: unknown language code{suggestion or ';'} expected an ISO 639-1 code; those with "
        f"sentence rules of their own are {', '.join(sorted(OWN_RULES))}"
    )


def log_fallback(code: str) -> None:
    """Logs if a language is split with the rules of another one; a warning if it has no marks to split at."""
    if code in WITHOUT_SENTENCE_MARKS:
        log.warning(
            "--language=%s: %s has no mark at the end of a sentence, so sentences end only with their line and at "
            '".", "!" and "?"; write one sentence a line and pass --sentences lines, or pass --pairs none',
            code,
            _NAMES[code][0],
        )
    elif code not in OWN_RULES:
        log.info("--language=%s has no sentence rules of its own: using those of a related language or English", code)


def _nearest(code: str) -> str:
    """Returns the closest known code to a name, variant or misspelling of a language; else an empty string."""
    wanted = code.strip().lower().replace("_", "-")
    for candidate in (wanted, wanted.partition("-")[0]):
        if candidate in _NAMES:
            return candidate
    by_name = {name.lower(): language for language, names in _NAMES.items() for name in names}
    close = difflib.get_close_matches(wanted, by_name, n=1, cutoff=0.75)
    return by_name[close[0]] if close else ""
